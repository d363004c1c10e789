"""Several ranks, each stuck in a call that another of them has not come to: their orders of calls differ.

Members of one group issue the same sequence. So for each call of the cycle, count on every rank how far each other
group of the cycle had come before it: the rank that differs from the majority departed from the order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from fr_exporter.analysis.situation import Accusation, Component, Culprit, Situation
from fr_exporter.analysis.waitgraph import StuckCall
from fr_exporter.analysis.wording import name_stuck
from fr_exporter.diagnosis import Cause, Confidence
from fr_exporter.model import Calls, Operation, ProcessGroup
from fr_exporter.ranges import name_ranks


def check(component: Component, situation: Situation) -> Culprit | None:
    """Accuse those whose order departs from the majority, all at a tie; else all ranks of the cycle."""
    if len(component.ranks) < 2 or not all(call.certain for call in component.calls):
        return None
    accusations = _departing(component, situation) or _outvoted(component) or _all(component)
    by_rank = {accusation.rank: accusation for accusation in accusations}
    return Culprit(Cause.ORDER_DEADLOCK, tuple(by_rank[rank] for rank in sorted(by_rank)), component.calls)


@dataclass(frozen=True, slots=True)
class _Disagreement:
    """How far group `before` had come when each rank issued `call`: last sequence ID -> ranks."""

    call: StuckCall
    before: ProcessGroup
    camps: dict[int, list[int]]
    issued_ns: int


def _departing(component: Component, situation: Situation) -> list[Accusation]:
    first = min(_disagreements(component, situation), key=lambda found: found.issued_ns, default=None)
    if first is None:
        return []
    sizes = Counter({seq_id: len(ranks) for seq_id, ranks in first.camps.items()})
    (majority, largest), (_, second) = sizes.most_common(2)
    is_tie = largest == second
    accusations: list[Accusation] = []
    for seq_id, ranks in first.camps.items():
        if seq_id == majority and not is_tie:
            continue
        other = next(value for value in first.camps if value != seq_id) if is_tie else majority
        evidence = (
            f"issued {name_stuck(first.call)} after call {seq_id} of process group {first.before.name}, "
            f"{name_ranks(first.camps[other])} after call {other} of it"
        )
        accusations.extend(Accusation(rank, evidence, "medium") for rank in ranks)
    return accusations


def _disagreements(component: Component, situation: Situation) -> Iterator[_Disagreement]:
    groups = {call.group.key: call.group for call in component.calls if call.id.kind == "collective"}
    for call in component.calls:
        if call.id.kind != "collective":
            continue
        issued = situation.issued_as(call.group, call.id.seq_id)
        for group in groups.values():
            if group == call.group:
                continue
            camps: dict[int, list[int]] = {}
            for rank, operation in issued.items():
                last = _last_before(situation.states[rank].dump.operations, operation, group)
                if last is not None:
                    camps.setdefault(last, []).append(rank)
            if len(camps) > 1:
                yield _Disagreement(call, group, camps, call.since_ns or 0)


def _last_before(calls: Calls, operation: Operation, group: ProcessGroup) -> int | None:
    """Return the last call of a group that a rank issued before an operation, None where its ring does not tell."""
    last = None
    for call in islice(calls, calls.history, None):
        if call.record_id >= operation.record_id:
            break
        if call.group == group and call.kind == "collective":
            last = call.collective_seq_id
    return last


def _outvoted(component: Component) -> list[Accusation]:
    """Accuse the minority where ranks that are members of every group of the cycle disagree on which call comes next.

    They issue one sequence, so that most of them show the right one. Nobody is accused at a tie.
    """
    members = [frozenset(call.group.ranks or ()) for call in component.calls]
    alike = frozenset(component.ranks).intersection(*members)
    next_calls = sorted(
        ((call, [rank for rank in call.waiters if rank in alike]) for call in component.calls),
        key=lambda choice: -len(choice[1]),
    )
    if len(next_calls) < 2 or len(next_calls[0][1]) == len(next_calls[1][1]):
        return []
    (majority, most), *rest = next_calls
    return [
        Accusation(
            rank, f"issued {name_stuck(call)} where {name_ranks(most)} issued {name_stuck(majority)} next", "medium"
        )
        for call, ranks in rest
        for rank in ranks
    ]


def _all(component: Component) -> list[Accusation]:
    """Accuse every rank of the cycle: each is in a call that the next has not come to."""
    confidence: Confidence = "medium" if len(component.ranks) == 2 else "low"
    accusations: list[Accusation] = []
    for call in component.calls:
        others = {*call.behind, *call.busy}.intersection(component.ranks)
        lacking = f", which {name_ranks(others)} has not come to" if others else ""
        evidence = f"is stuck in {name_stuck(call)}{lacking}: the ranks of the cycle call in different orders"
        accusations.extend(Accusation(rank, evidence, confidence) for rank in call.waiters if rank in component.ranks)
    return accusations
