"""Let the ranks run: hosts issue, devices work, calls end when all they need has come.

No clock ticks. A call starts on a rank once it was issued, the computation before it is done and so is what stands
before it on its stream; it ends once it has started on every rank that it needs. So each time follows from others, and
what never follows never happens: that is the hang.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fr_exporter.simulate.layout import Group
from fr_exporter.simulate.program import (
    Call,
    Compute,
    DeviceLost,
    DeviceStalls,
    HostStalls,
    Item,
    Join,
    Killed,
    Sync,
    Transfer,
)

_ISSUE_NS = 40_000
_TRANSFER_NS = 300_000
_NEVER = 2**62

# In these, ranks may legally bring tensors of different sizes.
_UNEVEN = frozenset({"all_to_all"})


@dataclass(slots=True, eq=False)
class Stream:
    """Calls of one rank that run one after the other: those that are ready to, each with the time since when it is."""

    run: RankRun
    ready: deque[tuple[Record, int]] = field(default_factory=deque)
    free_at_ns: int = 0
    is_busy: bool = False
    last_issued: Record | None = None


@dataclass(slots=True, eq=False)
class Membership:
    """One rank's part in a group: the counters of what it has issued, and its streams.

    Send and recv outside of batches have a stream for each `peer`; all else runs on the one of None.
    """

    collectives: int = 0
    p2p: int = 0
    operations: int = 0
    transfers: Counter[Transfer] = field(default_factory=Counter)
    streams: dict[int | None, Stream] = field(default_factory=dict)

    def count(self, call: Call) -> tuple[int, ...]:
        """Count a call, and return the number of each of its transfers among those like it, from 1."""
        if not call.transfers:
            self.collectives += 1
            self.operations += 1
            return ()
        self.p2p += 1
        self.operations += len(call.transfers)
        numbers = []
        for transfer in call.transfers:
            self.transfers[transfer] += 1
            numbers.append(self.transfers[transfer])
        return tuple(numbers)


@dataclass(slots=True, eq=False)
class Record:
    """One call of one rank, and when what happened to it: nanoseconds since the start, None for never.

    The sequence IDs and `op_id` are the counters of its group on this rank once it was issued. `numbers` counts each
    of its transfers among those of the same kind to the same peer; `unmet` of them are not done.
    """

    rank: int
    call: Call
    stream: Stream
    collective_seq_id: int
    p2p_seq_id: int
    op_id: int
    issued_ns: int
    numbers: tuple[int, ...]
    unmet: int
    started_ns: int | None = None
    completed_ns: int | None = None


@dataclass(slots=True, eq=False)
class Meeting:
    """Where the ranks of one collective, or the two sides of one transfer, come together.

    `first` is what the first to come brought; the meeting `agrees` while all bring the same, and something that can
    end. `starts_ns` is when the last to come came.
    """

    ranks: tuple[int, ...]
    first: Call
    arrived: dict[int, Record] = field(default_factory=dict)
    agrees: bool = True
    starts_ns: int = 0

    def join(self, record: Record, starts_ns: int) -> None:
        """Let a rank come."""
        self.arrived[record.rank] = record
        self.agrees = self.agrees and _agree(self.first, record.call)
        self.starts_ns = max(self.starts_ns, starts_ns)

    @property
    def is_complete(self) -> bool:
        """Whether all have come."""
        return len(self.arrived) == len(self.ranks)

    @property
    def lacks(self) -> list[int]:
        """The ranks that have not come."""
        return [rank for rank in self.ranks if rank not in self.arrived]


@dataclass(slots=True, eq=False)
class RankRun:
    """What became of one rank; `records` in issue order, times in nanoseconds since the start.

    `lost_ns` is from when on nothing of its device is seen, `dies_ns` from when on it does nothing. `leaves_dump` is
    False for a process that died.
    """

    rank: int
    items: Sequence[Item]
    records: list[Record] = field(default_factory=list)
    lost_ns: int = _NEVER
    dies_ns: int = _NEVER
    leaves_dump: bool = True
    next_item: int = 0
    host_ns: int = 0
    compute_ns: int = 0
    # What the computation has still to do, each with the time at which it was issued.
    queue: deque[tuple[Callable[[RankRun, Any, int], bool], Any, int]] = field(default_factory=deque)
    memberships: dict[Group, Membership] = field(default_factory=dict)

    @property
    def front(self) -> Record | None:
        """The oldest call that never completed."""
        return next((record for record in self.records if record.completed_ns is None), None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended: every rank's run, and the meetings that did not end well."""

    runs: Sequence[RankRun]
    meetings: Mapping[Hashable, Meeting]

    @property
    def hangs(self) -> bool:
        """Whether some call never completed."""
        return any(run.front is not None for run in self.runs)

    def unfinished(self, record: Record) -> list[Meeting]:
        """Return the meetings that a call still waits in."""
        return [self.meetings[key] for key, _ in _appointments(record) if key in self.meetings]


def run(programs: Sequence[Sequence[Item]]) -> Outcome:
    """Run the program of each rank to its end, or until nothing moves."""
    engine = _Engine([RankRun(rank, items) for rank, items in enumerate(programs)])
    engine.run()
    return Outcome(engine.runs, engine.meetings)


def _appointments(record: Record) -> list[tuple[Hashable, tuple[int, ...]]]:
    """Return the key of each meeting that a call takes part in, and the ranks that it needs."""
    call = record.call
    if not call.transfers:
        return [((call.group, record.collective_seq_id), call.group.ranks)]
    found: list[tuple[Hashable, tuple[int, ...]]] = []
    for (verb, peer), number in zip(call.transfers, record.numbers, strict=True):
        other = call.group.ranks[peer]
        ends = (record.rank, other) if verb == "send" else (other, record.rank)
        found.append(((call.group, ends, number), ends))
    return found


class _Engine:
    def __init__(self, runs: Sequence[RankRun]) -> None:
        self.runs = runs
        self.meetings: dict[Hashable, Meeting] = {}
        # Streams on which a call ended: the next may start there, and what waited for it may go on.
        self._freed: deque[Stream] = deque()
        self._first_death_ns = _NEVER
        self._steps: dict[type, Callable[[RankRun, Any], bool]] = {
            Call: self._issue,
            Compute: self._compute,
            Join: self._join,
            Sync: self._sync,
            HostStalls: self._stall_host,
            DeviceStalls: self._stall_device,
            DeviceLost: self._lose_device,
            Killed: self._kill,
        }

    def run(self) -> None:
        for run in self.runs:
            self._advance(run)
        while self._freed:
            stream = self._freed.popleft()
            self._start_next(stream)
            self._advance(stream.run)
        for run in self.runs:
            # A process that waits for others before it comes to where it dies is killed as it waits.
            if any(type(item) is Killed for item in run.items[run.next_item :]):
                run.leaves_dump = False

    def _advance(self, run: RankRun) -> None:
        # The host first: a fault must be known before the device gets there.
        self._run_host(run)
        while run.queue and self._run_device(run):
            self._run_host(run)

    def _run_host(self, run: RankRun) -> None:
        items, steps = run.items, self._steps
        while run.next_item < len(items):
            item = items[run.next_item]
            if not steps[type(item)](run, item):
                return
            run.next_item += 1

    def _run_device(self, run: RankRun) -> bool:
        """Let the device work, and tell whether it has done all that was issued."""
        queue = run.queue
        while queue:
            do, what, issued_ns = queue[0]
            if not do(run, what, issued_ns):
                return False
            queue.popleft()
        return True

    # What the host does; False where it cannot go on.

    def _compute(self, run: RankRun, item: Compute) -> bool:
        run.queue.append((self._work, item.duration_ns, run.host_ns))
        return True

    def _issue(self, run: RankRun, call: Call) -> bool:
        run.host_ns += _ISSUE_NS
        member = run.memberships.get(call.group)
        if member is None:
            member = run.memberships[call.group] = Membership()
        numbers = member.count(call)
        peer = call.transfers[0].peer if call.transfers and not call.batched else None
        stream = member.streams.get(peer)
        if stream is None:
            stream = member.streams[peer] = Stream(run)
        record = Record(
            run.rank,
            call,
            stream,
            member.collectives,
            member.p2p,
            member.operations,
            run.host_ns,
            numbers,
            len(numbers),
        )
        stream.last_issued = record
        run.records.append(record)
        run.queue.append((self._make_ready, record, run.host_ns))
        if call.blocking:
            run.queue.append((self._await, record, run.host_ns))
        return True

    def _join(self, run: RankRun, item: Join) -> bool:
        if item.group in run.memberships:
            for stream in run.memberships[item.group].streams.values():
                run.queue.append((self._await, stream.last_issued, run.host_ns))
        return True

    def _sync(self, run: RankRun, _: Sync) -> bool:
        if run.queue or run.lost_ns != _NEVER:
            return False
        run.host_ns = max(run.host_ns, run.compute_ns)
        return True

    def _stall_host(self, _: RankRun, __: HostStalls) -> bool:
        return False

    def _stall_device(self, run: RankRun, _: DeviceStalls) -> bool:
        self._die(run)
        return True

    def _lose_device(self, run: RankRun, _: DeviceLost) -> bool:
        run.lost_ns = run.host_ns
        return True

    def _kill(self, run: RankRun, _: Killed) -> bool:
        self._die(run)
        return False

    def _die(self, run: RankRun) -> None:
        run.dies_ns = run.host_ns
        self._first_death_ns = min(self._first_death_ns, run.host_ns)

    # What the device does; False where it cannot go on.

    def _work(self, run: RankRun, duration_ns: int, issued_ns: int) -> bool:
        ends_ns = max(run.compute_ns, issued_ns) + duration_ns
        if ends_ns > run.dies_ns:
            return False
        run.compute_ns = ends_ns
        return True

    def _make_ready(self, run: RankRun, record: Record, issued_ns: int) -> bool:
        record.stream.ready.append((record, max(run.compute_ns, issued_ns)))
        self._start_next(record.stream)
        return True

    def _await(self, run: RankRun, record: Record, _: int) -> bool:
        if record.completed_ns is None:
            return False
        run.compute_ns = max(run.compute_ns, record.completed_ns)
        return True

    def _start_next(self, stream: Stream) -> None:
        if stream.is_busy or not stream.ready:
            return
        record, ready_ns = stream.ready[0]
        starts_ns = max(ready_ns, stream.free_at_ns)
        if starts_ns > stream.run.dies_ns:
            return
        stream.ready.popleft()
        stream.is_busy = True
        record.started_ns = starts_ns
        for key, ranks in _appointments(record):
            self._meet(record, starts_ns, key, ranks)

    # Where ranks meet.

    def _meet(self, record: Record, starts_ns: int, key: Hashable, ranks: tuple[int, ...]) -> None:
        meeting = self.meetings.get(key)
        if meeting is None:
            meeting = self.meetings[key] = Meeting(ranks, record.call)
        meeting.join(record, starts_ns)
        root = record.call.root
        has_ended = self._end_together(meeting) if root is None else self._end_rooted(meeting, record, root)
        if has_ended and meeting.is_complete:
            del self.meetings[key]

    def _end_together(self, meeting: Meeting) -> bool:
        """End what all have come to, and tell whether it ended on all."""
        records = meeting.arrived.values()
        ends_ns = meeting.starts_ns + _TRANSFER_NS
        if not (meeting.is_complete and meeting.agrees and self._all_live(records, ends_ns)):
            return False
        alone = [record for record in records if record.call.ends_here_only]
        for record in alone or records:
            self._end(record, ends_ns)
        return not alone

    def _end_rooted(self, meeting: Meeting, comer: Record, root: int) -> bool:
        """Let the root go as soon as it came, and the others once it did; tell whether it ended on all who came."""
        source = meeting.arrived.get(root)
        if source is None or not meeting.agrees:
            return False
        records = meeting.arrived.values()
        for record in records if comer is source else (comer,):
            ends_ns = max(record.started_ns or 0, source.started_ns or 0) + _TRANSFER_NS
            if self._all_live((record, source), ends_ns):
                self._end(record, ends_ns)
        return all(record.completed_ns is not None for record in records)

    def _all_live(self, records: Collection[Record], until_ns: int) -> bool:
        return until_ns <= self._first_death_ns or all(record.stream.run.dies_ns >= until_ns for record in records)

    def _end(self, record: Record, ends_ns: int) -> None:
        """End a collective on one rank, or one transfer of a batch, which ends with its last."""
        stream = record.stream
        stream.free_at_ns = max(stream.free_at_ns, ends_ns)
        record.unmet -= 1
        if record.unmet <= 0:
            record.completed_ns = stream.free_at_ns
            stream.is_busy = False
            self._freed.append(stream)


def _agree(first: Call, other: Call) -> bool:
    """Tell whether two ranks brought the same call, one that can end."""
    if first.broken or other.broken:
        return False
    if other is first or other.transfers:
        return True
    if (other.operation, other.dtype) != (first.operation, first.dtype):
        return False
    return other.operation in _UNEVEN or other.inputs == first.inputs
