"""What can go wrong, as edits of one rank's program.

A fault is an item put in, a call that is another, or one that is not there; the rest follows. `FAULTS` is the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fr_exporter.simulate import evidence
from fr_exporter.simulate.aftermath import Aftermath
from fr_exporter.simulate.evidence import Evidence
from fr_exporter.simulate.program import Call, Compute, DeviceLost, DeviceStalls, HostStalls, Item, Killed, Transfer

Items = Sequence[Item]
Fits = Callable[[Items, int], bool]
Edit = Callable[[list[Item], int], None]
Tells = Callable[[Aftermath, int], Evidence]

_SLOWDOWN = 4


@dataclass(frozen=True, slots=True)
class Fault:
    """A way to go wrong. `fits` tells whether a program can be edited at an index, `edit` does it.

    `evidence` says what dumps then tell of a rank that it befell. A `hangs` of False lets the job go on.
    `whole_node` makes it befall every rank of a node.
    """

    name: str
    summary: str
    fits: Fits
    edit: Edit
    evidence: Tells
    hangs: bool = True
    whole_node: bool = False


def _anywhere(_: Items, __: int) -> bool:
    return True


def _is_blocking(program: Items, index: int) -> bool:
    """Tell whether the computation waits for this call, which has no root that may leave alone."""
    item = program[index]
    return isinstance(item, Call) and item.blocking and item.root is None


def _is_plain_collective(program: Items, index: int) -> bool:
    item = program[index]
    return _is_blocking(program, index) and isinstance(item, Call) and not item.transfers


def _is_compared_collective(program: Items, index: int) -> bool:
    """Tell whether this is a collective to which all ranks bring tensors of one size."""
    item = program[index]
    return isinstance(item, Call) and _is_plain_collective(program, index) and item.operation != "all_to_all"


def _ends_a_step(program: Items, index: int) -> bool:
    """Tell whether this is the reduction over the whole job, after which each host waits."""
    item = program[index]
    return isinstance(item, Call) and item.site == "grad_norm" and len(item.group.ranks) > 2


def _insert(item: Item) -> Edit:
    return lambda program, index: program.insert(index, item)


def _change(**changes: object) -> Edit:
    def edit(program: list[Item], index: int) -> None:
        program[index] = replace(program[index], **changes)  # type: ignore[arg-type]

    return edit


def _other_operation(program: list[Item], index: int) -> None:
    call = program[index]
    if isinstance(call, Call):
        operation = "all_reduce" if call.operation != "all_reduce" else "_all_gather_base"
        program[index] = replace(call, operation=operation)


def _other_size(program: list[Item], index: int) -> None:
    call = program[index]
    if isinstance(call, Call):
        larger = tuple((shape[0] + 1, *shape[1:]) for shape in call.inputs)
        program[index] = replace(call, inputs=larger, outputs=larger)


def _other_dtype(program: list[Item], index: int) -> None:
    call = program[index]
    if isinstance(call, Call):
        program[index] = replace(call, dtype="Half" if call.dtype != "Half" else "Float")


def _skip(program: list[Item], index: int) -> None:
    del program[index]


def _repeat(program: list[Item], index: int) -> None:
    program.insert(index, program[index])


def _next_shared(program: Items, index: int) -> int | None:
    """Return the index of the next call where it is a collective of another group with a second rank in common."""
    call = program[index]
    for later in range(index + 1, len(program)):
        item = program[later]
        if isinstance(item, Call):
            is_swappable = _is_plain_collective(program, later)
            if isinstance(call, Call) and is_swappable and item.group is not call.group:
                return later if len(set(call.group.ranks).intersection(item.group.ranks)) > 1 else None
            return None
    return None


def _can_swap(program: Items, index: int) -> bool:
    return _is_plain_collective(program, index) and _next_shared(program, index) is not None


def _swap(program: list[Item], index: int) -> None:
    later = _next_shared(program, index)
    if later is not None:
        program[index], program[later] = program[later], program[index]


def _has(verb: str) -> Fits:
    def fits(program: Items, index: int) -> bool:
        item = program[index]
        return isinstance(item, Call) and any(transfer.verb == verb for transfer in item.transfers)

    return fits


def _leave_out(verb: str) -> Edit:
    def edit(program: list[Item], index: int) -> None:
        call = program[index]
        if isinstance(call, Call):
            rest: tuple[Transfer, ...] = tuple(transfer for transfer in call.transfers if transfer.verb != verb)
            program[index : index + 1] = [replace(call, transfers=rest)] if rest else []

    return edit


def _slow_down(program: list[Item], index: int) -> None:
    program[index:] = [
        Compute(item.duration_ns * _SLOWDOWN) if isinstance(item, Compute) else item for item in program[index:]
    ]


def _leave_as_is(_: list[Item], __: int) -> None:
    """Leave the job healthy."""


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("host_stall", "a host stops issuing calls", _anywhere, _insert(HostStalls()), evidence.of_host_stall),
        Fault(
            "device_stall", "a device starts nothing more", _anywhere, _insert(DeviceStalls()), evidence.of_device_stall
        ),
        Fault(
            "device_lost",
            "a device serves its peers and is not seen to complete anything",
            _anywhere,
            _insert(DeviceLost()),
            evidence.of_device_lost,
        ),
        Fault("killed", "a process dies and leaves no dump", _anywhere, _insert(Killed()), evidence.of_death),
        Fault(
            "node_lost",
            "all processes of a node die and leave no dumps",
            _anywhere,
            _insert(Killed()),
            evidence.of_death,
            whole_node=True,
        ),
        Fault(
            "link_fault",
            "a call that all have come to does not end",
            _is_blocking,
            _change(broken=True),
            evidence.of_link_fault,
        ),
        Fault(
            "mismatch_operation",
            "a rank issues another collective",
            _is_compared_collective,
            _other_operation,
            evidence.of_mismatch,
        ),
        Fault(
            "mismatch_size",
            "a rank brings a tensor of another size",
            _is_compared_collective,
            _other_size,
            evidence.of_mismatch,
        ),
        Fault(
            "mismatch_dtype",
            "a rank brings a tensor of another dtype",
            _is_compared_collective,
            _other_dtype,
            evidence.of_mismatch,
        ),
        Fault("skipped_call", "a rank leaves a collective out", _is_plain_collective, _skip, evidence.of_other_order),
        Fault(
            "extra_call", "a rank issues a collective once more", _is_plain_collective, _repeat, evidence.of_other_order
        ),
        Fault(
            "order_swapped",
            "a rank issues two collectives in the other order",
            _can_swap,
            _swap,
            evidence.of_other_order,
        ),
        Fault(
            "missing_send", "a rank leaves a send out", _has("send"), _leave_out("send"), evidence.of_missing_transfer
        ),
        Fault(
            "missing_recv", "a rank leaves a recv out", _has("recv"), _leave_out("recv"), evidence.of_missing_transfer
        ),
        Fault(
            "ahead",
            "a call ends on one rank alone, which goes on",
            _ends_a_step,
            _change(ends_here_only=True),
            evidence.of_running_ahead,
        ),
        Fault(
            "slow_rank",
            "a rank computes four times slower; nothing hangs",
            _anywhere,
            _slow_down,
            evidence.of_nothing,
            hangs=False,
        ),
        Fault(
            "healthy",
            "ranks dump at different moments; nothing hangs",
            _anywhere,
            _leave_as_is,
            evidence.of_nothing,
            hangs=False,
        ),
    )
}
