"""What dumps can tell of a rank at fault, fault by fault: whom a right verdict names, and with which cause."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fr_exporter.simulate.aftermath import Aftermath


@dataclass(frozen=True, slots=True)
class Evidence:
    """A right verdict names all of `required`, none outside of `allowed`, and one of `causes`.

    A `note` says why dumps cannot tell the rank at fault from others; empty where they can.
    """

    required: frozenset[int]
    allowed: frozenset[int]
    causes: frozenset[str]
    note: str = ""


def _exactly(rank: int, *causes: str) -> Evidence:
    return Evidence(frozenset({rank}), frozenset({rank}), frozenset(causes))


def _one_of(ranks: Iterable[int], causes: Iterable[str], note: str) -> Evidence:
    return Evidence(frozenset(), frozenset(ranks), frozenset(causes), note)


def of_host_stall(aftermath: Aftermath, rank: int) -> Evidence:
    """Name a rank with nothing open that others are stuck for."""
    if rank in aftermath.fronts or not aftermath.waits_for(rank):
        return _one_of([rank], ["host_stall"], "a stalled host that waits for others itself, or that nobody waits for")
    return _exactly(rank, "host_stall")


def of_device_stall(aftermath: Aftermath, rank: int) -> Evidence:
    """Without timing a call that a device never started looks like one that all are in."""
    front = aftermath.fronts.get(rank)
    if front is None:
        return _exactly(rank, "host_stall", "device_stall")
    if aftermath.timing and front.started_ns is None and aftermath.is_started_elsewhere(front):
        return _exactly(rank, "device_stall")
    return Evidence(
        frozenset({rank}),
        frozenset(front.call.group.ranks),
        frozenset({"device_stall", "communication_fault"}),
        "a device that stops within a call, or before it and without timing, looks like one of all that are in it",
    )


def of_device_lost(aftermath: Aftermath, rank: int) -> Evidence:
    """Its peers have completed what it has open; where it has nothing open its host seems to have stopped."""
    seen_open = aftermath.seen_open(rank)
    if not seen_open:
        return _exactly(rank, "host_stall")
    if all(call.completed_ns is None or call.call.root is not None for call in seen_open):
        return _one_of([rank], ["device_stall"], "a lost device of which no peer completed what it has open")
    return _exactly(rank, "device_stall")


def of_death(aftermath: Aftermath, rank: int) -> Evidence:
    """Name a rank without a dump; of several, those for which alone somebody is stuck."""
    dead = frozenset(run.rank for run in aftermath.outcome.runs if not run.leaves_dump)
    causes = frozenset({"missing_dump"})
    if aftermath.faulty - dead:
        return _one_of([rank], causes, "a dead rank beside a living one at fault may have waited for that one itself")
    is_awaited = any(rank in lacks and lacks <= dead for lacks in aftermath.lacking.values())
    return Evidence(frozenset({rank}) if is_awaited else frozenset(), frozenset({rank}), causes)


def of_link_fault(aftermath: Aftermath, rank: int) -> Evidence:
    """All are in the call; whose link it is no dump tells."""
    stuck = frozenset(other for meeting in aftermath.never_ending if rank in meeting.ranks for other in meeting.ranks)
    return Evidence(stuck, stuck, frozenset({"communication_fault"}))


def of_mismatch(aftermath: Aftermath, rank: int) -> Evidence:
    """One against two or more is the odd one; one against one is not."""
    front = aftermath.fronts.get(rank)
    members = frozenset({rank}) if front is None else frozenset(front.call.group.ranks)
    if len(members) == 2:
        return _one_of(members, ["collective_mismatch"], "two ranks that disagree: either may be wrong")
    return _exactly(rank, "collective_mismatch")


def of_other_order(aftermath: Aftermath, rank: int) -> Evidence:
    """Two others that issue the same sequence show which one is right."""
    causes = ("order_deadlock", "collective_mismatch")
    if aftermath.ranks_in_role() > 2:
        return _exactly(rank, *causes)
    return _one_of(_stuck_with(aftermath, rank), causes, "no third rank shows which of two sequences is right")


def of_missing_transfer(aftermath: Aftermath, rank: int) -> Evidence:
    """Two others that issue the same sequence show who left the transfer out."""
    causes = ("p2p_unmatched", "order_deadlock")
    if aftermath.ranks_in_role() > 2:
        return _exactly(rank, *causes)
    return _one_of(_stuck_with(aftermath, rank), causes, "no third rank shows which side should have had the transfer")


def _stuck_with(aftermath: Aftermath, rank: int) -> frozenset[int]:
    """Return the members of the calls that lack a rank, or that it is stuck in."""
    fronts = [front for waiter, front in aftermath.fronts.items() if rank in (waiter, *aftermath.lacking[waiter])]
    return frozenset({rank}).union(*(front.call.group.ranks for front in fronts))


def of_running_ahead(_: Aftermath, rank: int) -> Evidence:
    """Name the rank that completed a call that the others are in."""
    return _exactly(rank, "desync")


def of_nothing(_: Aftermath, __: int) -> Evidence:
    """Nothing hangs."""
    return Evidence(frozenset(), frozenset(), frozenset())
