"""What one dump says, and which dumps belong together: plain frozen values.

Ranks are global unless a name says group rank. Times are integers, nanoseconds since the epoch; `None` is unknown.
Sequence IDs count from 1 per process group; a counter of `None` means that nothing was counted yet, or that the dump
does not tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Protocol, overload

import msgspec

Kind = Literal["collective", "p2p"]
Scope = Literal["job", "node"]


def members_digest(ranks: Iterable[int]) -> str:
    """Return 12 hex digits that stand for a member list; equal lists give equal digits in every process."""
    return sha256(",".join(map(str, ranks)).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """A process group: a name and its members. The same name with other members is another group.

    `ranks` are global ranks in group-rank order as written, or None where the dump does not list them. Two groups are
    equal when their `key` is: comparing 16,384 members for every call would cost ranks times ranks.
    """

    key: str
    name: str = field(compare=False)
    desc: str = field(compare=False)
    ranks: tuple[int, ...] | None = field(compare=False, repr=False)

    @classmethod
    def of(cls, name: str, desc: str, ranks: tuple[int, ...] | None, digest: str | None = None) -> ProcessGroup:
        """Build a group; pass `digest` (from `members_digest`) where it is known already."""
        if digest is None:
            digest = "" if ranks is None else members_digest(ranks)
        return cls(key=f"{name}#{digest}", name=name, desc=desc, ranks=ranks)

    @property
    def digest(self) -> str:
        """What stands for its member list; empty where that is unknown."""
        return self.key.rpartition("#")[2]


class Frame(msgspec.Struct, frozen=True):
    """One stack frame of the Python code that issued a call, as the recorder wrote it."""

    name: str = ""
    filename: str = ""
    line: int = 0


class Operation(msgspec.Struct, frozen=True, gc=False):
    """One recorded call of one rank.

    `operation` holds no peers (`nccl:send`); `source` and `destination` are **group** ranks of a send or recv, None
    where unknown. Sizes are shapes, one a tensor. `frames` are kept only for calls that may be shown.
    """

    record_id: int
    group: ProcessGroup
    kind: Kind
    collective_seq_id: int
    p2p_seq_id: int
    operation: str
    source: int | None
    destination: int | None
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]
    state: str
    retired: bool
    issued_ns: int | None
    started_ns: int | None
    completed_ns: int | None
    timeout_ms: int | None
    frames: tuple[Frame, ...]

    @property
    def seq_id(self) -> int:
        """The sequence ID that counts this kind of call in its group."""
        return self.p2p_seq_id if self.kind == "p2p" else self.collective_seq_id


class Outline(NamedTuple):
    """What is asked of many calls, where few are looked at closely; `place` is the call's index in its ring."""

    place: int
    record_id: int
    kind: Kind
    collective_seq_id: int
    p2p_seq_id: int
    operation: str
    source: int | None
    destination: int | None
    state: str
    retired: bool


class Rows(Protocol):
    """The recorded calls of one rank as the parser keeps them."""

    def operations(self, indices: Iterable[int]) -> Iterator[Operation]:
        """Return the calls at some indices."""

    def outlines(self, indices: Iterable[int]) -> list[Outline]:
        """Return the outlines of the calls at some indices, much faster than the calls themselves."""


@dataclass(frozen=True, slots=True)
class Extremes:
    """What is asked of all calls of a rank at once; None and 0 where no call tells.

    `newest_time_ns` is the latest time of any kind. `record_starts` tells whether any call shows that it was started:
    without timing none does.
    """

    last_record_id: int | None
    newest_issue_ns: int | None
    newest_time_ns: int | None
    longest_timeout_ms: int
    record_starts: bool

    @classmethod
    def of(cls, rows: Sequence[Any]) -> Extremes:
        """Work them out from rows in issue order, with the attributes of `Operation`."""
        issued, started, completed = (_largest(value_of, rows) for value_of in _TIMES)
        return cls(
            last_record_id=rows[-1].record_id if rows else None,
            newest_issue_ns=issued or None,
            newest_time_ns=max(issued, started, completed) or None,
            longest_timeout_ms=_largest(_TIMEOUT_MS, rows),
            record_starts=bool(started) or "started" in map(_STATE, rows),
        )


def _largest(value_of: Callable[[Any], int | None], rows: Sequence[Any]) -> int:
    return max(filter(None, map(value_of, rows)), default=0)


_KEY = attrgetter("key")
_STATE = attrgetter("state")
_TIMEOUT_MS = attrgetter("timeout_ms")
_TIMES = (attrgetter("issued_ns"), attrgetter("started_ns"), attrgetter("completed_ns"))


def whole_history(rows: Sequence[Any]) -> int | None:
    """Return 0 where the record IDs of rows in issue order show that none is left out, else None."""
    return 0 if rows and rows[-1].record_id - rows[0].record_id + 1 == len(rows) else None


class Column(NamedTuple):
    """The calls of one group: their indices in the order they were issued, and their collective sequence IDs."""

    indices: list[int]
    collective_seq_ids: list[int]


def columns(groups: Iterable[ProcessGroup], collective_seq_ids: Iterable[int]) -> dict[str, Column]:
    """Return the calls of each group by group key, from what each call has."""
    found: dict[str, Column] = {}
    for index, (key, seq_id) in enumerate(zip(map(_KEY, groups), collective_seq_ids, strict=True)):
        column = found.get(key)
        if column is None:
            column = found[key] = Column([], [])
        column.indices.append(index)
        column.collective_seq_ids.append(seq_id)
    return found


@dataclass(frozen=True, slots=True)
class Calls(Sequence[Operation]):
    """The recorded calls of one rank in the order it issued them.

    A job leaves hundreds of thousands of calls, of which a few are looked at. So they are held by group for what is
    asked of every call, and an `Operation` is built when it is asked for.

    `history` is the index from which on no call is left out; None where some may be, as completed ones are.
    """

    by_group: Mapping[str, Column]
    kinds: Sequence[Kind]
    extremes: Extremes
    history: int | None
    rows: Rows = field(repr=False)

    @classmethod
    def of(cls, operations: Sequence[Operation]) -> Calls:
        """Hold operations that exist already."""
        return cls(
            by_group=columns([call.group for call in operations], [call.collective_seq_id for call in operations]),
            kinds=[call.kind for call in operations],
            extremes=Extremes.of(operations),
            history=whole_history(operations),
            rows=_Ready(tuple(operations)),
        )

    def __len__(self) -> int:
        return len(self.kinds)

    @overload
    def __getitem__(self, index: int) -> Operation: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Operation]: ...

    def __getitem__(self, index: int | slice) -> Operation | Sequence[Operation]:
        chosen = range(len(self.kinds))[index]
        if isinstance(chosen, int):
            return next(self.rows.operations((chosen,)))
        return list(self.rows.operations(chosen))

    def __iter__(self) -> Iterator[Operation]:
        return self.rows.operations(range(len(self.kinds)))

    def outlines(self, key: str | None = None) -> list[Outline]:
        """Return the outlines of the calls of a group, or of all calls, in the order they were issued."""
        if key is None:
            return self.rows.outlines(range(len(self)))
        column = self.by_group.get(key)
        return [] if column is None else self.rows.outlines(column.indices)

    def above(self, key: str, seq_id: int) -> list[int]:
        """Return the indices of the calls of a group after this collective sequence ID."""
        column = self.by_group.get(key)
        return [] if column is None else [index for index, own in zip(*column, strict=True) if own > seq_id]

    def hold_all(self) -> bool:
        """Tell whether no call is left out between the first and the last, as completed ones may be."""
        return self.history == 0

    def p2p_groups(self) -> set[str]:
        """Return the keys of the groups with a send or recv among these calls."""
        if "p2p" not in self.kinds:
            return set()
        kinds = self.kinds
        return {key for key, (indices, _) in self.by_group.items() if any(kinds[index] == "p2p" for index in indices)}

    def issued_as(self, key: str, seq_id: int) -> Operation | None:
        """Return the first call recorded as this collective, None where the ring does not hold it."""
        column = self.by_group.get(key)
        if column is None or seq_id not in column.collective_seq_ids:
            return None
        for index, own in zip(*column, strict=True):
            if own == seq_id and self.kinds[index] == "collective":
                return self[index]
        return None


@dataclass(frozen=True, slots=True)
class _Ready:
    """Rows that are operations already."""

    ready: tuple[Operation, ...]

    def operations(self, indices: Iterable[int]) -> Iterator[Operation]:
        return map(self.ready.__getitem__, indices)

    def outlines(self, indices: Iterable[int]) -> list[Outline]:
        names = Outline._fields[1:]
        return [Outline(index, *(getattr(self.ready[index], name) for name in names)) for index in indices]


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """The counters of `pg_status` for one group on one rank; None where they read -1 or are absent.

    In a group used for send/recv these are the counters of its last call of either kind, and do not compare between
    ranks.
    """

    group: ProcessGroup
    last_enqueued: int | None
    last_started: int | None
    last_completed: int | None


# The source and the destination of a send or recv, group ranks.
Pair = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Standing:
    """One rank in one group, counted in collective sequence IDs; 0 stands for none yet.

    `last_completed` is the last collective up to which all are known to be done. `first_open` is the oldest open one,
    None where none is open. `counters` are those of the dump, as written; `mixed` tells that some rank uses the group
    for send/recv, so that they do not compare. `open_operations` counts both kinds. `newest_recorded` is the newest
    collective that the ring tells of, None where it holds no call of the group. `pairs_done` is how many sends and
    recvs are done, by (source, destination) in group ranks; None where the dump does not tell. `hides_transfers` tells
    that the counter shows open sends or recvs that the ring has lost.
    """

    group: ProcessGroup
    last_enqueued: int
    last_completed: int
    first_open: int | None
    open_operations: int
    counters: GroupProgress | None
    newest_recorded: int | None
    mixed: bool = False
    pairs_done: Mapping[Pair, int] | None = None
    hides_transfers: bool = False

    @property
    def position(self) -> int:
        """How far the rank got, in half calls: 2n: its first open call is n; 2n + 1: its last, n, is done."""
        return 2 * self.first_open if self.first_open is not None else 2 * self.last_enqueued + 1


class Reading(NamedTuple):
    """Where a rank stands in a group, and its open calls there in issue order."""

    standing: Standing
    open_calls: Sequence[Operation]


@dataclass(frozen=True, slots=True)
class Account:
    """One rank in one group, told from all that its ring held: by its counter (None without one), and by its calls.

    Which of the two is right only the dumps of all ranks tell: a counter says nothing where any rank uses the group for
    send/recv. `has_transfers` tells whether this rank does.
    """

    by_counter: Reading | None
    by_signs: Reading
    has_transfers: bool


@dataclass(frozen=True, slots=True)
class DumpFile:
    """A file that may hold a dump: its path, the rank and host its name gives, and what `stat` said."""

    path: str
    rank: int
    node: str | None
    mtime_ns: int
    size: int


@dataclass(frozen=True, slots=True)
class RankDump:
    """What one rank's dump says.

    `operations` are in the order the rank issued them (`record_id`). `dump_time_ns` is the file's mtime.
    `health` maps a device (`gpu`, `nic`) to its status word. `has_counters` is False where the writer keeps no
    `pg_status` at all (before torch 2.5, torchcomms). `accounts` are given, by group key, where `operations` are fewer
    than the ring held: then they tell what is open, and not the calls.
    """

    rank: int
    node: str | None
    source: str
    version: str
    comm_lib_version: str | None
    groups: tuple[ProcessGroup, ...]
    progress: tuple[GroupProgress, ...]
    operations: Calls
    health: Mapping[str, str]
    dump_time_ns: int | None
    has_counters: bool = True
    warnings: tuple[str, ...] = ()
    accounts: Mapping[str, Account] | None = None


@dataclass(frozen=True, slots=True)
class UnreadableFile:
    """A file that gave no dump, and why, in one line. `result` is `partial`, `rejected` or `unreadable`.

    `rank` is None where nothing tells whose dump it holds: it may be that of any rank without one.
    """

    file: str
    rank: int | None
    error: str
    result: str


@dataclass(frozen=True, slots=True)
class NodeRecords:
    """What one node tells of its ranks: their dumps, and the files that gave none.

    `attempt` counts the starts of the job. `clock_offset_ns` is what was added to the node's times, as its clock and
    that of the store differ.
    """

    training_job: str
    attempt: int
    node: str
    dumps: tuple[RankDump, ...]
    unreadable: tuple[UnreadableFile, ...] = ()
    clock_offset_ns: int = 0


@dataclass(frozen=True, slots=True)
class DumpSet:
    """The dumps of one incident, and what is known of the ranks without one.

    `dumps` maps rank to its usable dump. `world_size` None means: take it from the dumps' groups.
    `pending` ranks may still write; `stale` ones left only files of an earlier time. Every other expected rank without
    a dump is missing. `seen_ranks` are ranks that ever dumped here; with scope `node` all others are remote. Of
    `disputed` ranks there are dumps that contradict each other.
    """

    training_job: str
    source: str
    scope: Scope
    dumps: Mapping[int, RankDump]
    world_size: int | None = None
    partial: bool = False
    stale: frozenset[int] = frozenset()
    seen_ranks: frozenset[int] = frozenset()
    disputed: frozenset[int] = frozenset()
    unreadable: tuple[UnreadableFile, ...] = ()
    warnings: tuple[str, ...] = ()
