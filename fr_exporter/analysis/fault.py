"""All arrived in one and the same call, and it does not end: a link, a switch, NCCL, or a device."""

from __future__ import annotations

from fr_exporter.analysis.situation import Accusation, Component, Culprit, Situation
from fr_exporter.analysis.waitgraph import StuckCall
from fr_exporter.analysis.wording import name_stuck
from fr_exporter.diagnosis import Cause


def check(component: Component, _: Situation) -> Culprit | None:
    """Accuse nobody in particular: all members, at low confidence, where every one of them is in the call."""
    if not component.calls or not all(_has_arrived(call) for call in component.calls):
        return None
    if any(call.id.kind == "p2p" and call.matched is None for call in component.calls):
        return None
    named = name_stuck(min(component.calls, key=lambda call: (call.since_ns is None, call.since_ns or 0)))
    ranks = component.stuck_ranks
    evidence = f"is in {named} like all {len(ranks)} ranks of it; the dumps do not tell whose link or device failed"
    return Culprit(
        Cause.COMMUNICATION_FAULT, tuple(Accusation(rank, evidence, "low") for rank in ranks), component.calls
    )


def _has_arrived(call: StuckCall) -> bool:
    return call.certain and call.waits_for_nobody_seen and not call.busy
