"""A collective that is not the same on all ranks: operation, size or dtype."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping

from fr_exporter.analysis.operations import base_name, compared_sizes, element_counts
from fr_exporter.analysis.situation import Accusation, Component, Culprit, Situation
from fr_exporter.analysis.waitgraph import Reference, StuckCall
from fr_exporter.analysis.wording import name_group, name_ranks
from fr_exporter.diagnosis import Camp, Cause, Confidence, Mismatch, MismatchKind
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


def check(component: Component, situation: Situation) -> Culprit | None:
    """Accuse the minority where a call of this component, or the one that sets its rank apart, is not the same."""
    for group, seq_id in _calls_in_question(component, situation):
        mismatches = compare(group, seq_id, situation.issued_as(group, seq_id))
        if mismatches:
            own = tuple(call for call in situation.graph.calls.values() if _is(call, group, seq_id))
            return Culprit(Cause.COLLECTIVE_MISMATCH, _accuse(mismatches[0]), own)
    return None


def _is(call: StuckCall, group: ProcessGroup, seq_id: int) -> bool:
    return call.group == group and call.id.kind == "collective" and call.id.seq_id == seq_id


def _calls_in_question(component: Component, situation: Situation) -> Iterator[tuple[ProcessGroup, int]]:
    for call in component.calls:
        if call.id.kind == "collective":
            yield call.group, call.id.seq_id
    for rank in component.ranks:
        for call in situation.lacking.get(rank, ()):
            if rank in call.not_started:
                yield call.group, call.id.seq_id
        reference: Reference | None = situation.graph.own_fault.get(rank) or situation.graph.odd.get(rank)
        if reference is not None:
            yield reference.group, reference.seq_id


def _accuse(mismatch: Mismatch) -> tuple[Accusation, ...]:
    """Accuse the ranks outside the largest camp; all of them where two camps are the largest."""
    largest = mismatch.camps[0]
    total = sum(len(camp.ranks) for camp in mismatch.camps)
    is_tie = len(largest.ranks) == len(mismatch.camps[1].ranks)
    confidence: Confidence = "low" if is_tie else "high" if 2 * len(largest.ranks) > total else "medium"
    where = f"call {mismatch.collective_seq_id} of {name_group(mismatch.group)}"
    accusations: list[Accusation] = []
    for camp in mismatch.camps if is_tie else mismatch.camps[1:]:
        other = mismatch.camps[1] if camp is largest else largest
        evidence = f"issued {camp.value} as {where}, {name_ranks(other.ranks)} issued {other.value}"
        accusations.extend(Accusation(rank, evidence, confidence) for rank in camp.ranks)
    return tuple(sorted(accusations, key=lambda accusation: accusation.rank))


def _shapes_text(shapes: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join(f"[{', '.join(map(str, shape))}]" for shape in shapes)
