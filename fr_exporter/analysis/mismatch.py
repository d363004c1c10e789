"""A collective that is not the same on all ranks: operation, size or dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fr_exporter.analysis import alignment
from fr_exporter.analysis.progress import RankState
from fr_exporter.analysis.situation import Accusation, Component, Culprit, Situation
from fr_exporter.analysis.waitgraph import CallId, Reference
from fr_exporter.analysis.wording import name_group
from fr_exporter.diagnosis import Cause, Confidence, Mismatch
from fr_exporter.model import ProcessGroup
from fr_exporter.ranges import name_ranks


def check(component: Component, situation: Situation) -> Culprit | None:
    """Accuse the minority where a call of this component, or the one that sets its rank apart, is not the same."""
    for group, seq_id in _calls_in_question(component, situation):
        mismatches = situation.mismatches.get((group.key, seq_id))
        if mismatches:
            own = situation.graph.calls.get(CallId(group.key, "collective", seq_id))
            accusations = _accuse(mismatches[0], situation.states)
            return Culprit(Cause.COLLECTIVE_MISMATCH, accusations, () if own is None else (own,))
    return None


def _calls_in_question(component: Component, situation: Situation) -> Iterator[tuple[ProcessGroup, int]]:
    for call in component.calls:
        if call.id.kind == "collective":
            yield call.group, call.id.seq_id
    for rank in component.ranks:
        for call in situation.lacking.get(rank, ()):
            if rank in call.not_started:
                yield call.group, call.id.seq_id
        reference: Reference | None = situation.graph.own_fault.get(rank) or situation.graph.odd.get(rank)
        if reference is not None and reference.collective is not None:
            yield reference.collective


def _accuse(mismatch: Mismatch, states: Mapping[int, RankState]) -> tuple[Accusation, ...]:
    """Accuse the ranks outside the largest camp; all of them where two camps are the largest.

    Then their replicas may show which of them departs.
    """
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
    departed = alignment.departed([each.rank for each in accusations], states) if is_tie else {}
    decided = [
        Accusation(each.rank, f"{each.evidence}; {departed[each.rank]}", "medium")
        for each in accusations
        if each.rank in departed
    ]
    chosen = decided if 0 < len(decided) < len(accusations) else accusations
    return tuple(sorted(chosen, key=lambda accusation: accusation.rank))
