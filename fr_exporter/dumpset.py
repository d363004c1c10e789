"""Which files belong together: a pure state machine over the changes that a watcher saw.

A set is what one incident wrote. The caller passes the time: `now` is its own clock in seconds, of any origin.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from fr_exporter.model import Calls, DumpFile, DumpSet, Operation, ProcessGroup, RankDump, Scope, UnreadableFile
from fr_exporter.ranges import name_ranks

Outcome = RankDump | UnreadableFile

# Each rank's monitor polls once a second whether to dump, so the rank that shows newer calls need not be the first of
# a set to write: one that is stuck where it was in the last set may come up to this much earlier.
_HEADSTART_S = 1.0


# By how much the times in two records of one dump may differ, as clocks are compared in steps.
_RECORD_SLACK_NS = 60 * 10**9


@dataclass(frozen=True, slots=True)
class DumpSetSettings:
    """What is fixed for one target. `world_size` None: take it from the dumps' groups.

    `by_node` tells that each file was brought by the node it names: of two nodes that claim a rank one must be wrong.
    """

    training_job: str
    source: str
    scope: Scope
    world_size: int | None
    window_s: float
    grace_s: float
    by_node: bool = False


@dataclass(frozen=True, slots=True)
class _Reading:
    """A dump, the file it was read from, when that changed, and what is asked of its contents again and again."""

    dump: RankDump
    file: DumpFile
    at: float
    newest_ns: int | None
    longest_timeout_ms: int

    @classmethod
    def of(cls, dump: RankDump, file: DumpFile, at: float) -> _Reading:
        extremes = dump.operations.extremes
        return cls(dump, file, at, extremes.newest_issue_ns, extremes.longest_timeout_ms)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file of the present set: the last dump it gave, and why it cannot be read now, where it cannot."""

    file: DumpFile
    at: float
    reading: _Reading | None
    error: UnreadableFile | None


@dataclass(frozen=True, slots=True)
class _View:
    """The present set as it is once nobody is waited for, and whether every expected rank has dumped."""

    final: DumpSet
    complete: bool


class DumpSetTracker:
    """Sorts one target's files into the present set and what is left of earlier ones, change by change."""

    def __init__(self, settings: DumpSetSettings) -> None:
        self._settings = settings
        self._serial = 0
        self._at_startup = False
        self._opened = -math.inf
        self._last_change = -math.inf
        self._present: dict[str, _Entry] = {}
        self._removed: dict[str, _Entry] = {}
        self._earlier: dict[str, _Entry] = {}
        self._first_seen: dict[int, float] = {}
        self._view: _View | None = None

    @property
    def serial(self) -> int:
        """The number of the present set: it grows each time a set opens."""
        return self._serial

    @property
    def at_startup(self) -> bool:
        """Whether the present set lay there at start-up."""
        return self._at_startup

    def quiet_s(self, now: float) -> float:
        """Return the seconds since the present set last changed; for files found at start-up mtimes tell it."""
        return now - self._last_change

    def found(self, files: Iterable[tuple[DumpFile, Outcome]], *, now: float, wall_ns: int) -> None:
        """Take in the files of the start-up scan, made at `now`, which is `wall_ns` since the epoch.

        Their changes are taken to have happened when their mtimes say; just now, where those are unknown (0) or of the
        future. Where a set is there already, what is too old for it is of an earlier one.
        """
        serial = self._serial
        aged = [(max(0, wall_ns - (file.mtime_ns or wall_ns)), file, outcome) for file, outcome in files]
        for age_ns, file, outcome in sorted(aged, key=lambda found: (-found[0], found[1].path)):
            changed = now - age_ns / 1e9
            if changed < self._opened - self._settings.window_s:
                self.gone(file.path)
                self._earlier[file.path] = _Entry(file, changed, None, None)
                self._first_seen.setdefault(file.rank, changed)
            else:
                self.seen(file, outcome, now=max(changed, self._last_change))
        self._at_startup = self._at_startup or self._serial != serial

    def seen(self, file: DumpFile, outcome: Outcome, *, now: float) -> None:
        """Take in a file that is new or has changed, and what reading it gave."""
        before = self._present.get(file.path) or self._removed.pop(file.path, None)
        last = before or self._earlier.get(file.path)
        quiet = self.quiet_s(now) > self._settings.window_s
        if self._opens_a_set(outcome, before, quiet, now):
            self._open(now)
            before = self._present.get(file.path)
        # After a long quiet an unreadable file is the beginning of what comes next, and must not hide that quiet.
        elif not (quiet and isinstance(outcome, UnreadableFile)):
            self._last_change = now
        if isinstance(outcome, UnreadableFile):
            self._present[file.path] = _Entry(file, now, None if before is None else before.reading, outcome)
        else:
            dump = outcome if last is None or last.reading is None else _with_frames(outcome, last.reading.dump)
            self._present[file.path] = _Entry(file, now, _Reading.of(dump, file, now), None)
        self._earlier.pop(file.path, None)
        self._first_seen.setdefault(file.rank, now)
        self._view = None

    def gone(self, path: str) -> None:
        """Forget a file that is no longer there. Only for a directory that could be read."""
        # A polling watcher shows a file that is replaced as one that goes and comes: the next one is still a rewrite.
        if path in self._present:
            self._removed[path] = self._present.pop(path)
        self._earlier.pop(path, None)
        self._view = None

    def present(self, now: float) -> DumpSet:
        """Return the present set, empty where there is none."""
        view = self._current_view()
        return replace(view.final, partial=not view.complete and now < self._grace_ends)

    def deadline(self, now: float) -> float | None:
        """Return the time at which `present` changes by itself, None where only a file can change it."""
        return self._grace_ends if self.present(now).partial else None

    @property
    def _grace_ends(self) -> float:
        return self._opened + self._settings.grace_s

    def _opens_a_set(self, outcome: Outcome, before: _Entry | None, quiet: bool, now: float) -> bool:
        if not self._present:
            return True
        if isinstance(outcome, UnreadableFile):
            return False
        if quiet:
            return True
        if before is None or before.reading is None or self._opened == now:
            return False
        return _shows_newer_calls(outcome, before.reading.dump)

    def _open(self, now: float) -> None:
        """Open a set: all that was written before it is of an earlier one, but for what came with its first file."""
        kept = {}
        for path, entry in self._present.items():
            reading = entry.reading if entry.reading and now - entry.reading.at < _HEADSTART_S else None
            # Writers truncate in place, so a file that is half there now is being written for this set.
            error = entry.error if now - entry.at <= self._settings.window_s else None
            if reading is not None or error is not None:
                kept[path] = replace(entry, reading=reading, error=error)
            else:
                self._earlier[path] = entry
        self._present = kept
        self._removed.clear()
        self._opened = self._last_change = now
        self._serial += 1
        self._at_startup = False

    def _current_view(self) -> _View:
        if self._view is None:
            self._view = self._make_view()
        return self._view

    def _make_view(self) -> _View:
        settings = self._settings
        entries = self._present.values()
        readings = [entry.reading for entry in entries if entry.reading]
        claimed = _claimed_by_several(_timely(readings, settings.window_s)) if settings.by_node else {}
        usable = [reading for reading in readings if reading.file.rank not in claimed]
        dumps, warnings = _usable(usable, settings.window_s)
        if claimed:
            warnings.append(
                f"Not used: {_few(claimed)}, of which nodes have different dumps: see the unreadable files."
            )
        broken = [entry for entry in entries if entry.error]
        broken_ranks = {entry.file.rank for entry in broken} | claimed.keys()
        ranks_with_files = {entry.file.rank for entry in (*entries, *self._earlier.values())}
        world = _world(dumps, settings.world_size)
        # Ranks outside the world were of an attempt with more of them: nobody should wait for those.
        seen = (self._first_seen.keys() & world).union(dumps) if world else self._first_seen.keys()
        expected = (
            world if settings.scope == "job" else {rank for rank in seen if self._first_seen[rank] < self._opened}
        )
        final = DumpSet(
            training_job=settings.training_job,
            source=settings.source,
            scope=settings.scope,
            dumps=dumps,
            world_size=settings.world_size,
            stale=frozenset(ranks_with_files - dumps.keys() - broken_ranks),
            seen_ranks=frozenset(seen),
            disputed=frozenset(claimed),
            unreadable=(
                *(entry.error for entry in sorted(broken, key=lambda entry: entry.file.path) if entry.error),
                *claimed.values(),
            ),
            warnings=tuple(warnings),
        )
        # Where nothing tells whom to expect, only the grace tells when to stop waiting.
        complete = not self._present or (bool(expected) and (expected | broken_ranks) <= dumps.keys())
        return _View(final, complete)


def final_set(files: Sequence[tuple[DumpFile, Outcome]], settings: DumpSetSettings) -> DumpSet:
    """Return the newest set among files that nobody writes any more; mtimes and contents tell what is stale."""
    tracker = DumpSetTracker(settings)
    tracker.found(files, now=0.0, wall_ns=max((file.mtime_ns for file, _ in files), default=0))
    return tracker.present(math.inf)


def _shows_newer_calls(new: RankDump, old: RankDump) -> bool:
    """Tell whether a rank issued calls between two of its dumps, by whatever both of them tell."""
    before = _progress(old)
    slack = {} if new.accounts is None else {"newest call": _RECORD_SLACK_NS}
    return any(after > before[what] + slack.get(what, 0) for what, after in _progress(new).items() if what in before)


def _progress(dump: RankDump) -> dict[str, int]:
    """Return all that grows with each call; the record ID restarts with the process, the time does not.

    The counters are all that a dump without entries has.
    """
    progress = {f"group {entry.group.key}": entry.last_enqueued for entry in dump.progress}
    progress["newest call"] = dump.operations.extremes.newest_issue_ns
    progress["last record"] = dump.operations.extremes.last_record_id
    return {what: count for what, count in progress.items() if count is not None}


def _with_frames(new: RankDump, old: RankDump) -> RankDump:
    """Give the calls that come without frames those an earlier dump had: a second attempt is written without."""
    if new.accounts is not None:  # where the record was made this was done
        return new
    frames = {_identity(operation): operation.frames for operation in old.operations if operation.frames}
    if not frames:
        return new
    operations = [
        operation
        if operation.frames or _identity(operation) not in frames
        else msgspec.structs.replace(operation, frames=frames[_identity(operation)])
        for operation in new.operations
    ]
    return replace(new, operations=Calls.of(operations))


def _identity(operation: Operation) -> tuple[int, str, int | None]:
    """Tell calls of one rank apart; the time does so for two processes, whose record IDs both begin at 0."""
    return operation.record_id, operation.group.key, operation.issued_ns


def _world(dumps: Mapping[int, RankDump], world_size: int | None) -> set[int]:
    """Return the ranks of the job, as far as they are known."""
    if world_size is not None:
        return set(range(world_size))
    groups = {group for dump in dumps.values() for group in dump.groups}
    return {rank for group in groups for rank in group.ranks or ()}


def _usable(readings: list[_Reading], window_s: float) -> tuple[dict[int, RankDump], list[str]]:
    """Return the dumps whose contents fit together, one a rank, and a warning for each kind of those left out."""
    timely = _timely(readings, window_s)
    by_rank, doubles = _newest_of_each_rank(timely)
    contradicted = _contradicted(by_rank)
    lagging = {reading.file.rank for reading in readings} - by_rank.keys()
    warnings = []
    if lagging:
        warnings.append(
            f"Left out as stale: {_few(lagging)}, whose newest call was issued long before that of the others."
        )
    if contradicted:
        warnings.append(
            f"Left out as stale: {_few(contradicted)}, whose process groups contradict those of the others, as"
            " files of another attempt do."
        )
    if doubles:
        used, other = doubles[0]
        warnings.append(
            f"Several files of {_few(reading.file.rank for _, reading in doubles)}: the newer is used, as"
            f" {_name(used)} instead of {_name(other)}."
        )
    return {rank: by_rank[rank].dump for rank in sorted(by_rank.keys() - contradicted)}, warnings


def _few(ranks: Iterable[int]) -> str:
    return name_ranks(ranks, max_length=80)


def _name(reading: _Reading) -> str:
    return reading.file.path.rpartition("/")[2]


def _timely(readings: list[_Reading], window_s: float) -> list[_Reading]:
    """Leave out dumps that end long before the newest; a stalled rank may lag by its waiters' timeout."""
    newest = max((reading.newest_ns for reading in readings if reading.newest_ns is not None), default=0)
    timeout_ms = max((reading.longest_timeout_ms for reading in readings), default=0)
    earliest = newest - int(window_s * 1e9) - timeout_ms * 1_000_000
    return [reading for reading in readings if reading.newest_ns is None or reading.newest_ns >= earliest]


def _claimed_by_several(readings: list[_Reading]) -> dict[int, UnreadableFile]:
    """Return the ranks of which several nodes have dumps that differ, and what stands for those dumps.

    Nobody can know which is right. The same dump twice is no dispute: its node may have changed its name.
    """
    by_rank: dict[int, list[_Reading]] = defaultdict(list)
    for reading in readings:
        by_rank[reading.file.rank].append(reading)
    claimed = {}
    for rank, claims in sorted(by_rank.items()):
        if any(_progress(claim.dump) != _progress(claims[0].dump) for claim in claims[1:]):
            nodes = sorted({claim.file.node or "?" for claim in claims})
            error = (
                f"refused: nodes {' and '.join(nodes)} have different dumps of rank {rank}; let one of them publish it"
            )
            claimed[rank] = UnreadableFile(min(claim.file.path for claim in claims), rank, error, "rejected")
    return claimed


def _newest_of_each_rank(readings: list[_Reading]) -> tuple[dict[int, _Reading], list[tuple[_Reading, _Reading]]]:
    """Return one reading a rank, and (used, left out) for each other one."""
    by_rank: dict[int, _Reading] = {}
    doubles = []
    for reading in sorted(readings, key=_age_order, reverse=True):
        used = by_rank.setdefault(reading.file.rank, reading)
        if used is not reading:
            doubles.append((used, reading))
    return by_rank, sorted(doubles, key=lambda double: (double[1].file.rank, double[1].file.path))


def _age_order(reading: _Reading) -> tuple[int, int, str]:
    return reading.file.mtime_ns, reading.newest_ns or 0, reading.file.path


@dataclass(frozen=True, slots=True, eq=False)
class _Camp:
    """The ranks that claim the same members for one group name."""

    members: frozenset[int]
    ranks: frozenset[int]
    first_rank: int
    newest_ns: int | None


@dataclass(frozen=True, slots=True)
class _Dispute:
    """Two camps of one name that claim a rank of each other and so cannot both be of this set."""

    winner: _Camp
    loser: _Camp

    @classmethod
    def between(cls, one: _Camp, other: _Camp) -> _Dispute:
        """Let the later camp win; where the times do not tell, the larger; then the one with the smallest rank."""
        if _told_by_time(one, other):
            first = (one.newest_ns or 0) > (other.newest_ns or 0)
        else:
            first = (len(one.ranks), -one.first_rank) > (len(other.ranks), -other.first_rank)
        return cls(one, other) if first else cls(other, one)

    def order(self) -> tuple[bool, int, int, int]:
        """Sort the clearest first, so that a camp that is out already has no say in what follows."""
        winner = self.winner
        by_time = _told_by_time(winner, self.loser)
        return not by_time, -(winner.newest_ns or 0), -len(winner.ranks), winner.first_rank


def _told_by_time(one: _Camp, other: _Camp) -> bool:
    return one.newest_ns is not None and other.newest_ns is not None and one.newest_ns != other.newest_ns


def _contradicted(readings: Mapping[int, _Reading]) -> set[int]:
    """Return the ranks whose groups contradict those of later dumps; never one whose dump has no entries."""
    camps_of: dict[int, list[_Camp]] = defaultdict(list)
    disputes: dict[_Dispute, None] = {}
    for camps in _camps_by_name(readings):
        disputes.update(dict.fromkeys(_disputes(camps)))
        for camp in camps:
            for rank in camp.ranks:
                camps_of[rank].append(camp)
    standing = Counter({camp: len(camp.ranks) for camps in camps_of.values() for camp in camps})
    beaten: set[int] = set()
    for dispute in sorted(disputes, key=_Dispute.order):
        if not standing[dispute.winner] or not standing[dispute.loser]:
            continue
        newly_beaten = dispute.loser.ranks - beaten
        beaten |= newly_beaten
        standing.subtract(camp for rank in newly_beaten for camp in camps_of[rank])
    return {rank for rank in beaten if readings[rank].dump.operations}


def _camps_by_name(readings: Mapping[int, _Reading]) -> Iterator[list[_Camp]]:
    """Yield the camps of each group name for which there are several."""
    claims: dict[str, dict[ProcessGroup, set[int]]] = defaultdict(lambda: defaultdict(set))
    for rank in sorted(readings):
        for group in readings[rank].dump.groups:
            if group.ranks is not None:
                claims[group.name][group].add(rank)
    for by_group in claims.values():
        if len(by_group) < 2:
            continue
        by_members: dict[frozenset[int], set[int]] = defaultdict(set)
        for group, ranks in by_group.items():
            by_members[frozenset(group.ranks or ())] |= ranks
        yield [_camp(members, ranks, readings) for members, ranks in by_members.items()]


def _camp(members: frozenset[int], ranks: set[int], readings: Mapping[int, _Reading]) -> _Camp:
    issued = (readings[rank].newest_ns for rank in ranks)
    newest_ns = max((time for time in issued if time is not None), default=None)
    return _Camp(members, frozenset(ranks), min(ranks), newest_ns)


def _disputes(camps: list[_Camp]) -> Iterator[_Dispute]:
    """Yield the disputes among the camps of one name, walking each member list once."""
    camps_of: dict[int, list[_Camp]] = defaultdict(list)
    for camp in camps:
        for rank in camp.ranks:
            camps_of[rank].append(camp)
    for camp in camps:
        for member in camp.members - camp.ranks:
            for rival in camps_of.get(member, ()):
                yield _Dispute.between(camp, rival)
