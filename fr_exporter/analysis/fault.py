"""All arrived in one and the same call, and it does not end: a link, a switch, NCCL, or a device."""

from __future__ import annotations

from fr_exporter.analysis.situation import Accusation, Component, Culprit, Situation
from fr_exporter.analysis.waitgraph import StuckCall
from fr_exporter.analysis.wording import name_stuck
from fr_exporter.diagnosis import Cause
from fr_exporter.ranges import name_ranks


def check(component: Component, _: Situation) -> Culprit | None:
    """Accuse nobody in particular: all ranks in it, at low confidence, where every member has got to the call."""
    if not component.calls or not all(_has_arrived(call) for call in component.calls):
        return None
    if any(call.id.kind == "p2p" and call.matched is None for call in component.calls):
        return None
    evidence: dict[int, str] = {}
    for call in reversed(component.calls):
        evidence.update(dict.fromkeys(call.waiters, _evidence(call)))
    accusations = (Accusation(rank, evidence[rank], "low") for rank in sorted(evidence))
    return Culprit(Cause.COMMUNICATION_FAULT, tuple(accusations), component.calls)


def _evidence(call: StuckCall) -> str:
    if call.matched is not None:
        others = f"and {name_ranks([call.matched])} is in its counterpart"
    elif len(call.waiters) < len(call.order):
        others = f"which {name_ranks(set(call.order) - set(call.waiters))} issued too and left"
    else:
        others = f"like all {len(call.waiters)} ranks of it"
    return f"is in {name_stuck(call)}, {others}; the dumps do not tell whose link or device failed"


def _has_arrived(call: StuckCall) -> bool:
    return call.certain and call.waits_for_nobody_seen and not call.busy
