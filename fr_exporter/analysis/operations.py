"""What is known of operations and backends by name. Names are open: an unknown one is analysed like any other."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from fr_exporter.model import Operation, Outline

Shapes = tuple[tuple[int, ...], ...]

# In these the root may finish alone, so that a peer's completion proves nothing.
ROOTED = frozenset({"broadcast", "_broadcast_oop", "reduce", "_reduce_oop", "gather", "scatter"})

# Backends whose calls never leave `scheduled`; `retired` is all they tell.
NEVER_COMPLETES = frozenset({"gloo"})

# What writers put for a size they do not know.
_UNKNOWN_SIZE = 2**64 - 1


def base_name(operation: str) -> str:
    """Return the operation without its backend: `all_reduce` for `nccl:all_reduce`."""
    return operation.rpartition(":")[2]


def is_rooted(operation: Operation) -> bool:
    """Tell whether the call has a root that may finish before the others."""
    return base_name(operation.operation).lower() in ROOTED


def is_done_by_state(operation: Operation | Outline) -> bool:
    """Tell whether the entry itself shows the call done. That it does not, proves nothing."""
    return operation.state == "completed" or is_done_by_retirement(operation)


def is_done_by_retirement(operation: Operation | Outline) -> bool:
    """Tell whether the call is retired in a backend where that is all that shows it done."""
    return operation.retired and operation.operation.partition(":")[0] in NEVER_COMPLETES


def has_timed_out(operation: Operation) -> bool:
    """Tell whether the watchdog gave the call up: retired, and not completed."""
    return operation.retired and not is_done_by_state(operation)


def _inputs(operation: Operation) -> Shapes:
    return operation.input_sizes


def _outputs(operation: Operation) -> Shapes:
    return operation.output_sizes


# Which sizes all ranks of a call must agree on. Operations that are not listed may differ legally (all_to_all with
# uneven splits, coalesced calls) or are not known.
_COMPARED_SIZES: dict[str, Callable[[Operation], Shapes]] = {
    "all_reduce": _inputs,
    "allreduce": _inputs,
    "all_reduce_barrier": _inputs,
    "all_reduce_sparse": _inputs,
    "broadcast": _inputs,
    "_broadcast_oop": _inputs,
    "reduce": _inputs,
    "_reduce_oop": _inputs,
    "all_gather": _inputs,
    "_all_gather_base": _inputs,
    "_allgather_base": _inputs,
    "allgather": _inputs,
    "reduce_scatter": _inputs,
    "_reduce_scatter_base": _inputs,
    "gather": _inputs,
    "scatter": _outputs,
}


def compared_sizes(operation: Operation) -> Shapes | None:
    """Return the shapes that must be the same on all ranks, None where they may differ or are not known."""
    choose = _COMPARED_SIZES.get(base_name(operation.operation).lower())
    shapes = () if choose is None else choose(operation)
    if not shapes or any(_UNKNOWN_SIZE in shape for shape in shapes):
        return None
    return shapes


def element_counts(shapes: Shapes) -> tuple[int, ...]:
    """Return the number of elements of each tensor: the same data in another shape is no mismatch."""
    return tuple(prod(shape) for shape in shapes)
