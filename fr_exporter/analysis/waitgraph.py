"""Who waits for whom.

Nodes are ranks and the calls they are stuck in. A rank leads to its call, a call to the ranks it lacks: what all ranks
of a call wait for is stored once, so that the graph grows with the members of groups and never with ranks times ranks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fr_exporter.analysis.operations import is_rooted
from fr_exporter.analysis.pairing import OpenPairs, Peer
from fr_exporter.analysis.progress import Front, RankState
from fr_exporter.model import Kind, Operation, ProcessGroup


class CallId(NamedTuple):
    """A call that ranks are stuck in. Every send or recv is a call of its own: `side` is (rank, record ID)."""

    group_key: str
    kind: Kind
    seq_id: int
    side: tuple[int, int] | None = None


Node = int | CallId

# How many peers a reference names.
_SAMPLE = 8


@dataclass(frozen=True, slots=True)
class StuckCall:
    """A call that `waiters` are stuck in, and the ranks that it lacks.

    `order` are the group's members with a dump by how far they got, shared by all calls of the group; the first `cut`
    of them are behind: they have not issued the call, or not got to it on their device. `not_started` have issued it
    and not started it while others have; `stalled` have issued it and stand alone by their own fault; `odd` went on
    past it. `busy` are stuck in an older call of another group: a weak reason, given only where there is no other.
    `unknown` are members without a dump. `matched` is the peer of a send/recv that is open and in front on both sides;
    `unmatched` tells that the counterpart was not issued.
    """

    id: CallId
    group: ProcessGroup
    waiters: tuple[int, ...]
    operation: Operation | None
    order: tuple[int, ...] = ()
    cut: int = 0
    not_started: tuple[int, ...] = ()
    stalled: tuple[int, ...] = ()
    busy: tuple[int, ...] = ()
    odd: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()
    matched: int | None = None
    unmatched: bool = False
    certain: bool = True

    @property
    def behind(self) -> tuple[int, ...]:
        """The members with a dump that have not got to this call."""
        return self.order[: self.cut]

    @property
    def waits_for_nobody_seen(self) -> bool:
        """Whether no member with a dump keeps this call waiting; weak reasons do not count."""
        return not (self.cut or self.not_started or self.stalled or self.odd)

    @property
    def since_ns(self) -> int | None:
        """When the oldest known waiter issued the call."""
        return None if self.operation is None else self.operation.issued_ns

    def lacks(self) -> set[int]:
        """Return the ranks with a dump that this call directly waits for; weak reasons do not count."""
        return {*self.behind, *self.not_started, *self.stalled, *self.odd}


class Reference(NamedTuple):
    """The open call that sets a rank apart: `total` peers completed it and it did not, or the other way round.

    `others` are the first few of them. `is_outnumbered` tells that more are stuck in it than completed it.
    """

    call: Operation
    others: tuple[int, ...]
    total: int
    is_outnumbered: bool = False

    @property
    def collective(self) -> tuple[ProcessGroup, int] | None:
        """The group and sequence ID of the call, None where it is a send or recv."""
        return (self.call.group, self.call.collective_seq_id) if self.call.kind == "collective" else None


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """The wait-for graph. `own_fault` ranks have a call open that a peer completed; `odd` ranks went on alone.

    Calls that only such ranks are in, who wait for nobody, lead nowhere.
    """

    calls: Mapping[CallId, StuckCall]
    edges: Mapping[Node, Sequence[Node]]
    own_fault: Mapping[int, Reference]
    odd: Mapping[int, Reference]


def build(states: Mapping[int, RankState]) -> WaitGraph:
    """Return the wait-for graph of the ranks with a dump."""
    members = _members_with_dump(states)
    pairs = OpenPairs(states)
    own_fault, odd = _departed(states, members, pairs)
    edges: dict[Node, list[Node]] = {rank: [] for rank in states}
    calls: dict[CallId, StuckCall] = {}
    for call, leads_to in (*_collective_calls(states, members, own_fault, odd), *_p2p_calls(states, pairs)):
        calls[call.id] = call
        edges[call.id] = leads_to
    stand_alone = {*own_fault, *odd, *_did_not_start(calls, states)}
    for call in calls.values():
        waiting = [rank for rank in call.waiters if rank not in stand_alone]
        for rank in waiting:
            edges[rank].append(call.id)
        if not waiting:
            edges[call.id] = []
    return WaitGraph(calls, edges, own_fault, odd)


def _did_not_start(calls: Mapping[CallId, StuckCall], states: Mapping[int, RankState]) -> Iterator[int]:
    """Yield who is surely in front of a call, lacks nobody for it, and has not started it where others have."""
    for call in calls.values():
        if not call.cut:
            in_front = set(call.waiters) if call.matched is None else {call.matched}
            yield from (rank for rank in in_front.intersection(call.not_started) if states[rank].certain)


def _members_with_dump(states: Mapping[int, RankState]) -> dict[str, list[int]]:
    """Return the ranks with a dump that say that they are in a group, by group key."""
    members: dict[str, list[int]] = {}
    for rank, state in states.items():
        for key, standing in state.standings.items():
            if standing.group.ranks is not None:
                members.setdefault(key, []).append(rank)
    return members


def _collective_calls(
    states: Mapping[int, RankState],
    members: Mapping[str, list[int]],
    own_fault: Mapping[int, Reference],
    odd: Mapping[int, Reference],
) -> Iterator[tuple[StuckCall, list[Node]]]:
    waiting: dict[ProcessGroup, dict[int, list[Front]]] = {}
    waiters: dict[tuple[str, int], list[int]] = {}
    for rank, state in states.items():
        for front in state.fronts:
            if front.kind == "collective":
                waiting.setdefault(front.group, {}).setdefault(front.seq_id, []).append(front)
                waiters.setdefault((front.group.key, front.seq_id), []).append(rank)
    for group, by_seq in waiting.items():
        roster = _Roster.of(group, members[group.key], states, own_fault, odd)
        for seq_id in sorted(by_seq):
            yield roster.call(seq_id, by_seq[seq_id], waiters[group.key, seq_id])


@dataclass(slots=True)
class _Roster:
    """The members of one group with a dump, by how far they got, and the calls of the group in order."""

    group: ProcessGroup
    states: Mapping[int, RankState]
    order: tuple[int, ...]
    positions: list[int]
    unknown: tuple[int, ...]
    own_fault: Mapping[int, Reference]
    odd: tuple[int, ...]
    previous: StuckCall | None = None

    @classmethod
    def of(
        cls,
        group: ProcessGroup,
        present: Sequence[int],
        states: Mapping[int, RankState],
        own_fault: Mapping[int, Reference],
        odd: Mapping[int, Reference],
    ) -> _Roster:
        # A member that never used the group has no standing in it: it has not arrived anywhere.
        position = dict.fromkeys((rank for rank in group.ranks or () if rank in states), 0)
        position.update((rank, states[rank].standings[group.key].position) for rank in present)
        order = tuple(sorted(position, key=lambda rank: (position[rank], rank)))
        unknown = tuple(rank for rank in group.ranks or () if rank not in states)
        went_on = tuple(rank for rank, reference in odd.items() if reference.call.group == group)
        return cls(group, states, order, [position[rank] for rank in order], unknown, own_fault, went_on)

    def call(self, seq_id: int, fronts: Sequence[Front], waiters: Sequence[int]) -> tuple[StuckCall, list[Node]]:
        """Return one call of the group and where it leads. Ask for the calls in ascending order."""
        key = self.group.key
        cut = bisect_left(self.positions, 2 * seq_id)
        arrived = self.order[cut : bisect_right(self.positions, 2 * seq_id)]
        not_started = _not_started(key, seq_id, arrived, self.states)
        stalled = tuple(rank for rank in arrived if rank in self.own_fault)
        busy: tuple[int, ...] = ()
        if not (cut or not_started or stalled or self.odd):
            here = set(waiters)
            busy = tuple(rank for rank in arrived if rank not in here and self.states[rank].fronts)
        call = StuckCall(
            id=CallId(key, "collective", seq_id),
            group=self.group,
            waiters=tuple(waiters),
            operation=_oldest(fronts),
            order=self.order,
            cut=cut,
            not_started=not_started,
            stalled=stalled,
            busy=busy,
            odd=self.odd,
            unknown=self.unknown,
            certain=all(self.states[rank].certain for rank in waiters),
        )
        leads_to: list[Node] = [*not_started, *stalled, *self.odd, *busy]
        # Who lacks an earlier call of the group lacks this one too: one edge to that call says so.
        if self.previous is not None and self.previous.cut:
            leads_to.append(self.previous.id)
        leads_to.extend(self.order[0 if self.previous is None else self.previous.cut : cut])
        self.previous = call
        return call, leads_to


def _oldest(fronts: Sequence[Front]) -> Operation | None:
    calls = [front.operation for front in fronts if front.operation is not None]
    return min(calls, key=lambda call: (call.issued_ns is None, call.issued_ns or 0), default=None)


def _not_started(key: str, seq_id: int, arrived: Sequence[int], states: Mapping[int, RankState]) -> tuple[int, ...]:
    """Return who has issued the call and not started it, where another member has; only where timing is on."""
    started = {rank: _has_started(states[rank], key, seq_id) for rank in arrived if states[rank].timing}
    if not any(started.values()):
        return ()
    return tuple(rank for rank, has_started in started.items() if not has_started)


def _has_started(state: RankState, key: str, seq_id: int) -> bool:
    standing = state.standings[key]
    last_started = None if standing.counters is None or standing.mixed else standing.counters.last_started
    if last_started is not None and last_started >= seq_id:
        return True
    return any(
        call.started_ns is not None or call.state == "started"
        for call in state.open_calls
        if call.group.key == key and call.kind == "collective" and call.collective_seq_id == seq_id
    )


def _p2p_calls(states: Mapping[int, RankState], pairs: OpenPairs) -> Iterator[tuple[StuckCall, list[Node]]]:
    in_front = {
        (rank, front.operation.record_id)
        for rank, state in states.items()
        for front in state.fronts
        if front.operation is not None
    }
    for rank, state in states.items():
        for front in state.fronts:
            if front.kind == "p2p" and front.operation is not None:
                peer = pairs.peer_of(rank, front.operation)
                # A part that the peer has completed is not what a batch waits for.
                if peer is not None and not peer.completed:
                    matched = peer.counterpart is not None and (peer.rank, peer.counterpart.record_id) in in_front
                    lags = matched and _lags(front.operation, state, peer, states)
                    yield _p2p_call(state, front, front.operation, peer, states, in_front=matched, lags=lags)


def _lags(call: Operation, own: RankState, peer: Peer, states: Mapping[int, RankState]) -> bool:
    """Tell whether the peer has not started its side of a send or recv that this rank has; only where timing is on."""
    if peer.counterpart is None or not states[peer.rank].timing:
        return False
    return _batch_started(call, own) and not _batch_started(peer.counterpart, states[peer.rank])


def _batch_started(call: Operation, state: RankState) -> bool:
    # Within a batch only the closing entry is ever seen started.
    return any(
        part.started_ns is not None or part.state == "started"
        for part in state.open_calls
        if part.kind == "p2p" and part.group == call.group and part.p2p_seq_id == call.p2p_seq_id
    )


def _p2p_call(
    state: RankState,
    front: Front,
    call: Operation,
    peer: Peer,
    states: Mapping[int, RankState],
    *,
    in_front: bool,
    lags: bool,
) -> tuple[StuckCall, list[Node]]:
    rank, other = state.dump.rank, states.get(peer.rank)
    is_seen = other is not None
    stuck = StuckCall(
        id=CallId(front.group.key, "p2p", front.seq_id, (rank, call.record_id)),
        group=front.group,
        waiters=(rank,),
        operation=call,
        order=(peer.rank,),
        cut=0 if in_front or not is_seen else 1,
        not_started=(peer.rank,) if lags else (),
        unknown=() if is_seen else (peer.rank,),
        matched=peer.rank if in_front else None,
        unmatched=is_seen and peer.counterpart is None,
        certain=state.certain and (other is None or other.certain),
    )
    # A pair that is in front on both sides holds both ranks: each leads to the other.
    return stuck, [peer.rank] if is_seen else []


def _departed(
    states: Mapping[int, RankState], members: Mapping[str, list[int]], pairs: OpenPairs
) -> tuple[dict[int, Reference], dict[int, Reference]]:
    """Return the ranks with a call open that a peer completed, and those who completed it and are the odd ones."""
    completed_by_peers: list[tuple[int, Reference]] = []
    odd: dict[int, Reference] = {}
    for group, waiting in _first_open_not_rooted(states).items():
        completions = _Completions.of(group, members[group.key], states)
        for seq_id in sorted(waiting):
            cut = bisect_left(completions.completed, seq_id)
            ahead = len(completions.ranks) - cut
            if not ahead:
                break
            stuck = completions.stuck(cut, seq_id) if cut > ahead else ()
            if len(stuck) > ahead and _all_went_on(completions.ranks[cut:], stuck, states, pairs):
                reference = Reference(waiting[seq_id][0][1], stuck[:_SAMPLE], len(stuck))
                for rank in completions.ranks[cut:]:
                    odd.setdefault(rank, reference)
                # Who completed a later call completed this one too: there is nobody new.
                break
            others = completions.ranks[cut : cut + _SAMPLE]
            is_outnumbered = len(stuck) > ahead
            completed_by_peers.extend(
                (rank, Reference(call, others, ahead, is_outnumbered)) for rank, call in waiting[seq_id]
            )
    completed_by_peers.extend(_p2p_completed_by_peer(states, pairs))
    own_fault: dict[int, Reference] = {}
    for rank, reference in completed_by_peers:
        # Of several such calls the one that the rank issued first sets it apart.
        known = own_fault.get(rank)
        if rank not in odd and (known is None or reference.call.record_id < known.call.record_id):
            own_fault[rank] = reference
    return own_fault, odd


def _p2p_completed_by_peer(states: Mapping[int, RankState], pairs: OpenPairs) -> Iterator[tuple[int, Reference]]:
    for rank, state in states.items():
        for batch in _open_batches(state) if state.fronts else ():
            peers = [pairs.peer_of(rank, call) for call in batch]
            # What a batch waits for may be any of its parts.
            others = tuple(dict.fromkeys(peer.rank for peer in peers if peer is not None and peer.completed))
            if all(peer is not None and peer.completed for peer in peers):
                yield rank, Reference(batch[0], others, len(others))


def _open_batches(state: RankState) -> Iterable[Sequence[Operation]]:
    """Return the open sends and recvs by the call that issued them: a batch of several, or one."""
    batches: dict[tuple[str, int], list[Operation]] = {}
    for call in state.open_calls:
        if call.kind == "p2p" and (call.source is not None or call.destination is not None):
            batches.setdefault((call.group.key, call.p2p_seq_id), []).append(call)
    return batches.values()


@dataclass(frozen=True, slots=True)
class _Completions:
    """The members of one group with a dump by last completed, and how far each enqueued.

    A cut parts those who completed a call from those who did not.
    """

    ranks: tuple[int, ...]
    completed: list[int]
    enqueued: list[int]

    @classmethod
    def of(cls, group: ProcessGroup, present: Sequence[int], states: Mapping[int, RankState]) -> _Completions:
        standings = {rank: states[rank].standings[group.key] for rank in present}
        ranks = tuple(sorted(present, key=lambda rank: (standings[rank].last_completed, rank)))
        return cls(
            ranks=ranks,
            completed=[standings[rank].last_completed for rank in ranks],
            enqueued=[standings[rank].last_enqueued for rank in ranks],
        )

    def stuck(self, cut: int, seq_id: int) -> tuple[int, ...]:
        """Return who issued the call and did not complete it."""
        issued = zip(self.ranks[:cut], self.enqueued, strict=False)
        return tuple(rank for rank, enqueued in issued if enqueued >= seq_id)


def _all_went_on(ahead: Sequence[int], stuck: Sequence[int], states: Mapping[int, RankState], pairs: OpenPairs) -> bool:
    """Tell whether each of `ahead` issued a call, in whatever group, that no stuck rank has issued."""
    most: dict[str, int] = {}
    for rank in stuck:
        for key, standing in states[rank].standings.items():
            most[key] = max(most.get(key, 0), standing.last_enqueued)
    waiting = frozenset(stuck)
    return all(_went_on(rank, states[rank], most, waiting, pairs) for rank in ahead)


def _went_on(rank: int, state: RankState, most: Mapping[str, int], stuck: frozenset[int], pairs: OpenPairs) -> bool:
    for key, standing in state.standings.items():
        is_shared = not stuck.isdisjoint(standing.group.ranks or ())
        if is_shared and standing.last_enqueued > most.get(key, 0):
            return True
    peers = (pairs.peer_of(rank, call) for call in state.open_calls)
    return any(
        peer is not None and peer.rank in stuck and peer.counterpart is None and not peer.completed for peer in peers
    )


def _first_open_not_rooted(
    states: Mapping[int, RankState],
) -> dict[ProcessGroup, dict[int, list[tuple[int, Operation]]]]:
    """Return each rank's oldest open collective without a root that may finish alone, by group and sequence ID."""
    open_in: dict[ProcessGroup, dict[int, list[tuple[int, Operation]]]] = {}
    for rank, state in states.items():
        if not state.fronts:
            continue
        first: dict[ProcessGroup, Operation] = {}
        for call in state.open_calls:
            if call.kind == "collective" and call.group.ranks is not None and not is_rooted(call):
                first.setdefault(call.group, call)
        for group, call in first.items():
            open_in.setdefault(group, {}).setdefault(call.collective_seq_id, []).append((rank, call))
    return open_in
