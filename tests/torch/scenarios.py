"""What each rank of a small job does in the step that goes wrong, and beside it the truth about that step.

The job has eight ranks: two tensor groups of four, four context groups of two within them, four data groups of two
across them, and the group of all. Every step issues `STEP`; `GOOD_STEPS` of them stand before the faulty one.

Nothing here needs torch: the job runs these scenarios, and the tests know the answers from them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fr_exporter.diagnosis import Cause

PREFIX = "comm_lib_trace_rank_"
FORMS = ("pickle", "json")

WORLD_SIZE = 8
GOOD_STEPS = 8
WORLD = "default_pg"
GROUPS: Mapping[str, Sequence[Sequence[int]]] = {
    "tensor": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "context": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "data": [[0, 4], [1, 5], [2, 6], [3, 7]],
}


@dataclass(frozen=True, slots=True)
class Call:
    """One collective; `group` is the description of its group, `numel` and `dtype` those of the rank's input."""

    group: str
    operation: str
    numel: int = 256
    dtype: str = "float32"


REDUCE = Call("tensor", "all_reduce")
EXCHANGE = Call("context", "all_to_all")
GATHER = Call("tensor", "all_gather")
GRADIENTS = Call("data", "all_reduce")
BARRIER = Call(WORLD, "barrier")
STEP = (REDUCE, EXCHANGE, GATHER, GRADIENTS, BARRIER)


@dataclass(frozen=True, slots=True)
class Hung:
    """A call that does not end; `nth` counts the calls of its group in the faulty step from 1."""

    group: str
    ranks: tuple[int, ...]
    nth: int = 1

    @property
    def seq_id(self) -> int:
        """The collective sequence ID, which counts all calls of the group from 1."""
        return GOOD_STEPS * sum(call.group == self.group for call in STEP) + self.nth


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way in which the faulty step goes, and what is true of it.

    `calls` are those that each rank issues in that step. A rank is stuck in its last one, unless it stops: `stopped`
    ranks complete theirs and issue no more, `frozen` ones are then suspended and `raised` ones end in an exception;
    neither of these two writes a dump. A `running` job goes on with good steps while it is asked for dumps. `listed`
    says whether the dumps list the members of the groups.

    `hung` are the calls in which ranks wait directly on a suspect, or which the suspects are stuck in: each is a right
    headline.
    """

    name: str
    calls: Mapping[int, Sequence[Call]]
    stopped: Collection[int] = ()
    frozen: Collection[int] = ()
    raised: Collection[int] = ()
    running: bool = False
    listed: bool = True
    cause: Cause | None = None
    suspects: Sequence[int] = ()
    hung: Sequence[Hung] = ()


EVERYBODY = range(WORLD_SIZE)


def each(ranks: Collection[int], *calls: Call) -> dict[int, Sequence[Call]]:
    """Return the same calls for each of these ranks."""
    return dict.fromkeys(ranks, calls)


# The tensor group in which nothing goes wrong waits for the gradients of the other one.
FIRST_WAITS = each(range(4), REDUCE, EXCHANGE, GATHER, GRADIENTS)
SECOND_WAITS = each(range(4, 8), REDUCE, EXCHANGE, GATHER, GRADIENTS)

STALL = {**FIRST_WAITS, **each([4, 5, 7], REDUCE), 6: ()}

HANGS = [
    Scenario(
        "host_stall",
        calls=STALL,
        stopped=[6],
        cause=Cause.HOST_STALL,
        suspects=[6],
        hung=[Hung("tensor", (4, 5, 6, 7)), Hung("data", (2, 6))],
    ),
    Scenario(
        "host_stall_within_the_step",
        calls={**FIRST_WAITS, 4: (REDUCE, EXCHANGE), 5: (REDUCE,), **each([6, 7], REDUCE, EXCHANGE, GATHER)},
        stopped=[5],
        cause=Cause.HOST_STALL,
        suspects=[5],
        hung=[Hung("context", (4, 5)), Hung("tensor", (4, 5, 6, 7), nth=2), Hung("data", (1, 5))],
    ),
    Scenario(
        "host_stall_of_two_ranks",
        calls={**each([0, 2, 3, 4, 5, 7], REDUCE), **each([1, 6])},
        stopped=[1, 6],
        cause=Cause.HOST_STALL,
        suspects=[1, 6],
        hung=[Hung("tensor", (0, 1, 2, 3)), Hung("tensor", (4, 5, 6, 7))],
    ),
    Scenario(
        "frozen_then_killed",
        calls={**SECOND_WAITS, **each([0, 1, 2], REDUCE), 3: ()},
        frozen=[3],
        cause=Cause.MISSING_DUMP,
        suspects=[3],
        hung=[Hung("tensor", (0, 1, 2, 3)), Hung("data", (3, 7))],
    ),
    Scenario(
        "raised",
        calls=STALL,
        raised=[6],
        cause=Cause.MISSING_DUMP,
        suspects=[6],
        hung=[Hung("tensor", (4, 5, 6, 7)), Hung("data", (2, 6))],
    ),
    Scenario(
        "operation_mismatch",
        calls={**SECOND_WAITS, **each([0, 1, 3], REDUCE), 2: (GATHER,)},
        cause=Cause.COLLECTIVE_MISMATCH,
        suspects=[2],
        hung=[Hung("tensor", (0, 1, 2, 3)), Hung("data", (2, 6))],
    ),
    Scenario(
        "size_mismatch",
        calls={**SECOND_WAITS, **each([0, 1, 3], REDUCE), 2: (Call("tensor", "all_reduce", numel=128),)},
        cause=Cause.COLLECTIVE_MISMATCH,
        suspects=[2],
        hung=[Hung("tensor", (0, 1, 2, 3)), Hung("data", (2, 6))],
    ),
    Scenario(
        "dtype_mismatch",
        calls={**SECOND_WAITS, **each([0, 1, 3], REDUCE), 2: (Call("tensor", "all_reduce", dtype="float64"),)},
        cause=Cause.COLLECTIVE_MISMATCH,
        suspects=[2],
        hung=[Hung("tensor", (0, 1, 2, 3)), Hung("data", (2, 6))],
    ),
    # A rank with nothing to reduce returns at once, and goes on.
    Scenario(
        "empty_tensor",
        calls={**SECOND_WAITS, **each([0, 1, 3], REDUCE), 2: (Call("tensor", "all_reduce", numel=0), EXCHANGE)},
        cause=Cause.COLLECTIVE_MISMATCH,
        suspects=[2],
        hung=[Hung("tensor", (0, 1, 2, 3)), Hung("context", (2, 3)), Hung("data", (2, 6))],
    ),
    Scenario(
        "extra_call",
        calls={**SECOND_WAITS, 0: (REDUCE, EXCHANGE), 1: (REDUCE, REDUCE), **each([2, 3], REDUCE, EXCHANGE, GATHER)},
        cause=Cause.COLLECTIVE_MISMATCH,
        suspects=[1],
        hung=[Hung("tensor", (0, 1, 2, 3), nth=2), Hung("context", (0, 1)), Hung("data", (1, 5))],
    ),
    Scenario(
        "skipped_call",
        calls={**SECOND_WAITS, **each([0, 1], REDUCE, EXCHANGE, GATHER), 2: (REDUCE, GATHER), 3: (REDUCE, EXCHANGE)},
        cause=Cause.ORDER_DEADLOCK,
        suspects=[2],
        hung=[Hung("context", (2, 3)), Hung("tensor", (0, 1, 2, 3), nth=2), Hung("data", (2, 6))],
    ),
    Scenario(
        "swapped_order",
        calls={**SECOND_WAITS, **each([0, 2, 3], REDUCE), 1: (EXCHANGE,)},
        cause=Cause.ORDER_DEADLOCK,
        suspects=[1],
        hung=[Hung("tensor", (0, 1, 2, 3)), Hung("context", (0, 1)), Hung("data", (1, 5))],
    ),
    Scenario(
        "swapped_order_of_a_group_and_all",
        calls={**SECOND_WAITS, **each([0, 2, 3], REDUCE, EXCHANGE, GATHER), 1: (REDUCE, EXCHANGE, BARRIER)},
        cause=Cause.ORDER_DEADLOCK,
        suspects=[1],
        hung=[Hung("tensor", (0, 1, 2, 3), nth=2), Hung(WORLD, tuple(EVERYBODY)), Hung("data", (1, 5))],
    ),
]

HEALTHY = [
    Scenario("finished", calls=each(EVERYBODY, *STEP), stopped=EVERYBODY),
    Scenario("running", calls=each(EVERYBODY, *STEP), stopped=EVERYBODY, running=True),
    # gloo adds up bits, whatever they stand for: the sum is wrong, and nobody waits.
    Scenario(
        "dtype_mismatch_of_equal_width",
        calls={**each(EVERYBODY, *STEP), 2: (Call("tensor", "all_reduce", dtype="int32"), *STEP[1:])},
        stopped=EVERYBODY,
    ),
]

UNDECIDED = [Scenario("members_not_listed", calls=STALL, stopped=[6], listed=False)]
