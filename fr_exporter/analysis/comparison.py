"""In what the ranks' versions of one collective differ: operation, size or dtype."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from fr_exporter.analysis.operations import base_name, compared_sizes, element_counts
from fr_exporter.diagnosis import Camp, Mismatch, MismatchKind
from fr_exporter.model import Operation, ProcessGroup


def _operation(call: Operation) -> tuple[Hashable, str] | None:
    name = base_name(call.operation)
    # The closing entry of a batch stands for calls of any name.
    return None if name == "coalesced" else (name.lower(), call.operation)


def _size(call: Operation) -> tuple[Hashable, str] | None:
    shapes = compared_sizes(call)
    return None if shapes is None else (element_counts(shapes), _shapes_text(shapes))


def _dtype(call: Operation) -> tuple[Hashable, str] | None:
    dtypes = call.input_dtypes or call.output_dtypes
    return (dtypes, ", ".join(dtypes)) if dtypes else None


# What must agree, the most telling first: the value to compare and its text, None where it may differ or is unknown.
COMPARISONS: tuple[tuple[MismatchKind, Callable[[Operation], tuple[Hashable, str] | None]], ...] = (
    ("operation", _operation),
    ("size", _size),
    ("dtype", _dtype),
)


def compare(group: ProcessGroup, seq_id: int, issued: Mapping[int, Operation]) -> list[Mismatch]:
    """Return how the ranks' versions of one collective differ, the most telling first.

    Sizes and dtypes are compared only where the operation agrees: they follow from it.
    """
    found: list[Mismatch] = []
    for kind, value_of in COMPARISONS:
        camps = _camps(issued, value_of)
        if len(camps) > 1:
            found.append(Mismatch(group, seq_id, kind, camps))
            if kind == "operation":
                break
    return found


def _camps(
    issued: Mapping[int, Operation], value_of: Callable[[Operation], tuple[Hashable, str] | None]
) -> tuple[Camp, ...]:
    ranks: dict[Hashable, list[int]] = {}
    texts: dict[Hashable, str] = {}
    for rank in sorted(issued):
        compared = value_of(issued[rank])
        if compared is not None:
            value, text = compared
            ranks.setdefault(value, []).append(rank)
            texts.setdefault(value, text)
    camps = [Camp(texts[value], tuple(members)) for value, members in ranks.items()]
    return tuple(sorted(camps, key=lambda camp: (-len(camp.ranks), camp.ranks)))


def _shapes_text(shapes: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join(f"[{', '.join(map(str, shape))}]" for shape in shapes)
