"""Which process groups hung: those of the calls in which ranks wait directly on a culprit, or that are its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fr_exporter.analysis.situation import Culprit, Situation
from fr_exporter.analysis.waitgraph import CallId, StuckCall
from fr_exporter.diagnosis import Cause, HungGroup
from fr_exporter.model import Kind, ProcessGroup

# Where every member is in the call, the ranks in it wait on nobody in particular.
_NOBODY_IN_PARTICULAR = frozenset({Cause.COMMUNICATION_FAULT})


@dataclass(slots=True)
class _Found:
    """What was found of one group and kind of call."""

    group: ProcessGroup
    kind: Kind
    culprits: list[Culprit] = field(default_factory=list)
    calls: dict[CallId, StuckCall] = field(default_factory=dict)


def hung_groups(culprits: Sequence[Culprit], situation: Situation) -> tuple[HungGroup, ...]:
    """Return the hung process groups, the headline first.

    Those waiting on more culprits come first, then on those with a dump; then a call that does not end although all
    are in it, before what waits for those ranks; then collectives before send/recv (a receive is posted long before its
    data is due), the other way round for `p2p_unmatched`; then the earlier call; then more direct waiters.
    """
    found: dict[tuple[str, Kind], _Found] = {}
    for culprit in culprits:
        for call in _calls_of(culprit, situation):
            entry = found.setdefault((call.group.key, call.id.kind), _Found(call.group, call.id.kind))
            if not entry.culprits or entry.culprits[-1] is not culprit:
                entry.culprits.append(culprit)
            entry.calls.setdefault(call.id, call)
    ordered = sorted(found.values(), key=_rank_in_order)
    return tuple(_hung_group(entry) for entry in ordered)


def _calls_of(culprit: Culprit, situation: Situation) -> Iterable[StuckCall]:
    direct = {call.id: call for rank in sorted(culprit.ranks) for call in situation.lacking.get(rank, ())}
    direct.update((call.id, call) for call in culprit.calls)
    if direct:
        return direct.values()
    # Nobody waits for it directly: where it is stuck itself is all there is to show.
    return [call for call in situation.graph.calls.values() if not culprit.ranks.isdisjoint(call.waiters)]


def _rank_in_order(entry: _Found) -> tuple[int, int, bool, bool, int, int, str]:
    is_p2p = entry.kind == "p2p"
    unmatched = any(culprit.cause is Cause.P2P_UNMATCHED for culprit in entry.culprits)
    first = _first_call(entry)
    waiters = {rank for call in entry.calls.values() for rank in call.waiters}
    never_ends = bool(_never_ending(entry))
    seen = sum(culprit.cause is not Cause.MISSING_DUMP for culprit in entry.culprits)
    return (
        -len(entry.culprits),
        -seen,
        not never_ends,
        is_p2p is not unmatched,
        _since(first),
        -len(waiters),
        entry.group.key,
    )


def _hung_group(entry: _Found) -> HungGroup:
    call = _first_call(entry)
    cause = entry.culprits[0].cause
    suspects = frozenset[int]().union(*(culprit.ranks for culprit in entry.culprits))
    waiters = {rank for stuck in entry.calls.values() for rank in stuck.waiters}
    waiting = waiters - suspects or waiters
    members = frozenset(entry.group.ranks or ())
    operation = call.operation
    return HungGroup(
        group=entry.group,
        cause=cause,
        operation=None if operation is None else operation.operation,
        kind=entry.kind,
        collective_seq_id=call.id.seq_id if operation is None else operation.collective_seq_id,
        p2p_seq_id=None if operation is None or entry.kind == "collective" else operation.p2p_seq_id,
        input_sizes=() if operation is None else operation.input_sizes,
        dtypes=() if operation is None else operation.input_dtypes,
        waiting_ranks=tuple(sorted(waiters if cause in _NOBODY_IN_PARTICULAR else waiting)),
        waiting_on=() if cause in _NOBODY_IN_PARTICULAR else tuple(sorted(suspects & members)),
        since_ns=call.since_ns,
        frames=() if operation is None else operation.frames,
    )


def _first_call(entry: _Found) -> StuckCall:
    """Return the earliest call; where one does not end although all are in it, not those that wait for its ranks."""
    calls = _never_ending(entry) or entry.calls.values()
    return min(calls, key=lambda call: (_since(call), call.id.seq_id))


def _never_ending(entry: _Found) -> list[StuckCall]:
    faults = (culprit for culprit in entry.culprits if culprit.cause in _NOBODY_IN_PARTICULAR)
    return [call for culprit in faults for call in culprit.calls if call.id in entry.calls]


def _since(call: StuckCall) -> int:
    # A call older than the ring was issued before all that the ring holds.
    return 0 if call.since_ns is None else call.since_ns
