"""One rank that stopped: its host issues nothing more, or its device does not get on; or it went on alone."""

from __future__ import annotations

from fr_exporter.analysis.progress import RankState
from fr_exporter.analysis.situation import Accusation, Component, Culprit, Situation
from fr_exporter.analysis.waitgraph import Reference
from fr_exporter.analysis.wording import MANY, name_group, name_operation, name_stuck, waits
from fr_exporter.diagnosis import Cause, Confidence
from fr_exporter.ranges import name_ranks


def check_desync(component: Component, situation: Situation) -> Culprit | None:
    """Accuse a rank that completed a call which the majority is still in, and went on."""
    odd = [rank for rank in component.ranks if rank in situation.graph.odd]
    if not odd:
        return None
    return Culprit(Cause.DESYNC, tuple(Accusation(rank, _went_on(rank, situation), "low") for rank in odd))


def _went_on(rank: int, situation: Situation) -> str:
    reference = situation.graph.odd[rank]
    call = reference.call
    enqueued = situation.states[rank].standings[call.group.key].last_enqueued
    return (
        f"completed call {call.seq_id} of {name_group(call.group)} and went on to {enqueued}, "
        f"while {_peers(reference)} never got past {call.seq_id}"
    )


def check_device_stall(component: Component, situation: Situation) -> Culprit | None:
    """Accuse a rank whose peers completed a call it has open, or that did not start what the others started."""
    if len(component.ranks) != 1:
        return _check_alone(component)
    rank = component.ranks[0]
    reference = situation.graph.own_fault.get(rank)
    if reference is not None:
        evidence = f"is stuck in {name_operation(reference.call)}, which {_peers(reference)} completed"
        if reference.collective is not None:
            standing = situation.states[rank].standings[reference.call.group.key]
            evidence += f"; it completed {standing.last_completed} and issued {standing.last_enqueued} there"
        # Where most are stuck in it, the call may as well have ended too early on the few.
        confidence: Confidence = "low" if reference.is_outnumbered else "high"
        return Culprit(Cause.DEVICE_STALL, (Accusation(rank, evidence, confidence),))
    for stuck in situation.lacking.get(rank, ()):
        if rank in stuck.not_started:
            evidence = f"issued {name_stuck(stuck)} and did not start it, while others did: {waits(stuck.waiters)}"
            return Culprit(Cause.DEVICE_STALL, (Accusation(rank, evidence, "medium"),))
    return None


def _check_alone(component: Component) -> Culprit | None:
    """Accuse a rank that is stuck in a call of a group of its own."""
    for call in component.calls:
        if call.group.ranks is not None and len(call.group.ranks) == 1:
            evidence = f"is stuck in {name_stuck(call)}, a group of this rank alone"
            return Culprit(Cause.DEVICE_STALL, (Accusation(call.waiters[0], evidence, "medium"),), (call,))
    return None


def check_host_stall(component: Component, situation: Situation) -> Culprit | None:
    """Accuse a rank with nothing open that others wait for: its host stopped issuing calls."""
    if len(component.ranks) != 1 or component.calls or not component.waited_for:
        return None
    rank = component.ranks[0]
    state = situation.states[rank]
    if state.fronts:
        return None
    evidence = f"{_last_words(state)}; {_who_waits(rank, situation)}"
    confidence: Confidence = "medium" if state.in_flight is not None else "high"
    return Culprit(Cause.HOST_STALL, (Accusation(rank, evidence, confidence),))


def _last_words(state: RankState) -> str:
    if state.in_flight is not None:
        return f"has only just issued {name_operation(state.in_flight)}"
    if state.dump.operations:
        return f"has nothing open and issued nothing after {name_operation(state.dump.operations[-1])}"
    return "has nothing open, and its dump holds no calls"


def _who_waits(rank: int, situation: Situation) -> str:
    calls = sorted(
        situation.lacking.get(rank, ()), key=lambda call: (call.id.kind, -len(call.waiters), call.since_ns or 0)
    )
    if not calls:
        return "others wait for calls that it is busy with"
    first = calls[0]
    evidence = f"{waits(first.waiters)} for it in {name_stuck(first)}"
    standing = situation.states[rank].standings.get(first.group.key)
    if standing is not None and first.id.kind == "collective":
        evidence += f" (it issued {standing.last_enqueued} there)"
    if len(first.waiters) > MANY:
        return evidence
    others = {waiter for call in calls[1:] for waiter in call.waiters} - set(first.waiters)
    return f"{evidence}, {waits(others)} for it elsewhere" if others else evidence


def _peers(reference: Reference) -> str:
    more = reference.total - len(reference.others)
    return f"{name_ranks(reference.others)} and {more} more" if more > 0 else name_ranks(reference.others)
