"""A send or recv without its counterpart."""

from __future__ import annotations

from fr_exporter.analysis.situation import Accusation, Component, Culprit, Situation
from fr_exporter.analysis.waitgraph import StuckCall
from fr_exporter.analysis.wording import name_stuck
from fr_exporter.diagnosis import Cause


def check(component: Component, situation: Situation) -> Culprit | None:
    """Accuse the ranks that went past a counterpart that they never issued."""
    if component.calls:
        unmatched = [call for call in component.calls if call.unmatched]
    else:
        unmatched = [call for rank in component.ranks for call in situation.lacking.get(rank, ()) if call.unmatched]
    pairs = {(call.waiters[0], call.order[0]) for call in component.calls if call.unmatched}
    accusations: dict[int, Accusation] = {}
    # Of the calls of one pair the first tells as much as all.
    for (waiter, peer), call in {(call.waiters[0], call.order[0]): call for call in reversed(unmatched)}.items():
        # Two ranks, each in a send or recv to the other that the other never met, or one that went on.
        if (peer, waiter) in pairs or _went_past(peer, call, situation):
            evidence = f"never issued the counterpart of {name_stuck(call)} and went on; rank {waiter} waits for it"
            accusations.setdefault(peer, Accusation(peer, evidence, "medium"))
    if not accusations:
        return None
    suspects = tuple(accusations[rank] for rank in sorted(accusations))
    return Culprit(Cause.P2P_UNMATCHED, suspects, component.calls)


def _went_past(peer: int, call: StuckCall, situation: Situation) -> bool:
    """Tell whether the peer issued a collective of a shared group that comes after the waiter's send or recv."""
    waiter, waiting = situation.states[call.waiters[0]], call.operation
    theirs = situation.states[peer].standings
    if waiting is None:
        return False
    if any(
        key in theirs and theirs[key].last_enqueued > standing.last_enqueued
        for key, standing in waiter.standings.items()
    ):
        return True
    return any(
        later.group.key in theirs and theirs[later.group.key].last_enqueued >= later.collective_seq_id
        for later in waiter.dump.operations
        if later.kind == "collective" and later.record_id > waiting.record_id
    )
