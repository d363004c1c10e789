"""Plain data of any dump version -> `RankDump`.

The wire types below name every key we read, with the type it must have; keys we do not know are passed over, so that a
newer minor version still reads. Everything that differs between versions is dealt with here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Annotated, Any

import msgspec

from fr_exporter.errors import MalformedDump, RejectedDump
from fr_exporter.model import (
    Calls,
    Extremes,
    Frame,
    GroupProgress,
    Kind,
    Operation,
    ProcessGroup,
    RankDump,
    columns,
)
from fr_exporter.parsing.interning import CallName, Interning

KNOWN_MAJORS = (1, 2)
NEWEST_KNOWN = (2, 10)
# The bare list of torch 2.2 carries no version.
LIST_VERSION = "1.0"

_ALL_COLLECTIVE: tuple[Kind] = ("collective",)
_COLLECTIVE_SEQ_ID = attrgetter("collective_seq_id")
_IS_P2P = attrgetter("is_p2p")
_PG_ID = attrgetter("pg_id")
_PROCESS_GROUP = attrgetter("process_group")
_PROFILING_NAME = attrgetter("profiling_name")
_STATE = attrgetter("state")

# Counters, times and ids fit in 64 bits; what does not would break whoever reads the result.
_Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

_PLAIN_TYPES = frozenset({dict, list, tuple, str, int, float, bool, type(None)})

Shapes = tuple[tuple[int, ...], ...]


class _Entry(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What we read of one element of `entries`, in the order of `_KEYS`."""

    record_id: _Int
    profiling_name: str
    process_group: tuple[str, str]
    collective_seq_id: _Int
    p2p_seq_id: _Int
    pg_id: _Int | None
    issued_ns: _Int | None
    started_ns: _Int | None
    completed_ns: _Int | None
    input_sizes: Shapes | None
    output_sizes: Shapes | None
    input_dtypes: tuple[str, ...] | None
    output_dtypes: tuple[str, ...] | None
    state: str
    retired: bool
    timeout_ms: _Int | None
    is_p2p: bool


# The keys of `_Entry`, with what stands for them where a writer leaves them out; None: they must be there.
_KEYS: dict[str, Any] = {
    "record_id": None,
    "profiling_name": None,
    "process_group": None,
    "collective_seq_id": None,
    "p2p_seq_id": 0,
    "pg_id": None,
    "time_created_ns": None,
    "time_discovered_started_ns": None,
    "time_discovered_completed_ns": None,
    "input_sizes": (),
    "output_sizes": (),
    "input_dtypes": (),
    "output_dtypes": (),
    "state": "",
    "retired": False,
    "timeout_ms": None,
    "is_p2p": False,
}

# What torch writes beside them, and nobody here needs.
_OTHER_KEYS = frozenset({"op_id", "duration_ms", "thread_id", "thread_name"})


class _Status(msgspec.Struct, frozen=True):
    """One value of `pg_status`; the JSON form writes numbers as strings."""

    last_enqueued_collective: _Int = -1
    last_started_collective: _Int = -1
    last_completed_collective: _Int = -1


class _Group(msgspec.Struct, frozen=True):
    """One value of `pg_config`; version 1 writes the bare member list instead."""

    desc: str = ""
    ranks: str | tuple[int, ...] = ()


class _Health(msgspec.Struct, frozen=True):
    """One value of `health_check_results`."""

    status: str = "unknown"


class _Dump(msgspec.Struct, frozen=True):
    """The top level."""

    version: str
    comm_lib_version: str | None = None
    nccl_version: str | None = None
    pg_config: dict[Any, Any] | None = None
    pg_status: dict[Any, Any] | None = None
    entries: list[Any] | None = None
    health_check_results: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """What the file tells beside its content: rank and host from its name, its path, its mtime."""

    rank: int
    node: str | None
    source: str
    mtime_ns: int | None


def to_rank_dump(data: object, origin: Origin, interning: Interning) -> RankDump:
    """Return what the plain data of one dump says.

    Raises:
        MalformedDump: a key is missing or has another type than a dump's; the message names it.
        RejectedDump: the version's major number is unknown, or something in it is no plain data.
    """
    if isinstance(data, (list, tuple)):
        data = {"version": LIST_VERSION, "entries": data}
    if not isinstance(data, dict):
        raise MalformedDump(f"not a dump: holds a {type(data).__name__}, not a dict or list")
    _refuse_other_types(value for key, value in data.items() if key != "entries")
    try:
        return _read(msgspec.convert(data, _Dump), origin, interning)
    except msgspec.ValidationError as error:
        raise MalformedDump(f"not a dump: {error}") from None


def _read(raw: _Dump, origin: Origin, interning: Interning) -> RankDump:
    warnings = _check_version(raw.version)
    groups = _Groups(raw.pg_config or {}, interning)
    operations = _calls(raw.entries or [], groups, interning)
    progress = _progress(raw.pg_status or {}, groups, warnings)
    return RankDump(
        rank=origin.rank,
        node=origin.node,
        source=origin.source,
        version=raw.version,
        comm_lib_version=raw.comm_lib_version or raw.nccl_version or None,
        groups=groups.listed(),
        progress=progress,
        operations=operations,
        health=_health(raw.health_check_results or {}),
        dump_time_ns=origin.mtime_ns,
        has_counters=bool(raw.pg_status),
        warnings=tuple(warnings),
    )


def _refuse_other_types(values: Iterable[Any]) -> None:
    """Refuse what no recorder writes: bytes, sets and the like, under any key."""
    pending = list(values)
    # A pickle can hold a list that holds itself, or one and the same list very often.
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) not in _PLAIN_TYPES:
            raise RejectedDump(f"refused: the file holds a {type(value).__name__}, a dump holds plain data only")
        if isinstance(value, dict):
            pending.extend(value.keys())
            pending.extend(value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend(value)


def _check_version(text: str) -> list[str]:
    """Return the warnings of this version; refuse an unknown major. Numbers compare as numbers: 2.10 is after 2.9."""
    try:
        version = tuple(int(part) for part in text.split("."))
    except ValueError:
        raise RejectedDump(f"refused: the dump has the version {text[:40]!r}, known are 1.x and 2.x") from None
    if version[0] not in KNOWN_MAJORS:
        raise RejectedDump(f"refused: the dump has version {text[:40]}, known are 1.x and 2.x")
    if version > NEWEST_KNOWN:
        return [f"dump version {text} is newer than any known here (2.10), read as 2.10"]
    return []


class _Groups:
    """The groups of one dump, by the name and desc that entries write."""

    def __init__(self, pg_config: Mapping[Any, Any], interning: Interning) -> None:
        self._interning = interning
        self._configs = {str(name): _group_config(value) for name, value in pg_config.items()}
        self._names_by_id = _names_by_members(self._configs) if any(map(_is_bare, pg_config.values())) else {}
        self._descs: dict[str, str] = {}
        self._known: dict[tuple[str, str], ProcessGroup] = {}
        self.by_local_id: dict[int | None, ProcessGroup] = {}

    def named(self, name: str, desc: str = "") -> ProcessGroup:
        """Return a group; its members are unknown where pg_config lacks it.

        Its desc is what the entries say, where pg_config's own is empty. Where both say something else this is a
        former group of that name (`split_group` uses names again), of which pg_config tells nothing any more.
        """
        desc = desc or self._descs.get(name, "")
        known = self._known.get((name, desc))
        if known is not None:
            return known
        config = self._configs.get(name)
        if config is None or (desc and config.desc and desc != config.desc):
            group = self._interning.group(name, desc, None)
        else:
            self._descs[name] = desc or config.desc
            group = self._interning.group(self._names_by_id.get(name, name), self._descs[name], config.ranks)
        self._known[name, desc] = group
        return group

    def listed(self) -> tuple[ProcessGroup, ...]:
        """Return every group of pg_config."""
        return tuple(map(self.named, self._configs))

    def names(self) -> list[str]:
        """Return the keys of pg_config."""
        return list(self._configs)


def _is_bare(value: object) -> bool:
    return not isinstance(value, dict)


def _names_by_members(configs: Mapping[str, _Group]) -> dict[str, str]:
    """Return local id -> name for the groups of torch 2.3, which have none.

    Named by their members, and a number where several have the same: the local id of one and the same group differs
    between ranks.
    """
    names: dict[str, str] = {}
    counts: dict[str, int] = {}
    for local_id, config in sorted(configs.items(), key=_by_number):
        ranks = config.ranks if isinstance(config.ranks, tuple) else ()
        name = f"{ranks[0]}-{ranks[-1]} of {len(ranks)}" if ranks else local_id
        counts[name] = counts.get(name, 0) + 1
        names[local_id] = name if counts[name] == 1 else f"{name} ({counts[name]})"
    return names


def _by_number(item: tuple[str, object]) -> tuple[int, str]:
    return (int(item[0]) if item[0].isdecimal() else -1, item[0])


def _group_config(value: object) -> _Group:
    if isinstance(value, dict):
        return msgspec.convert(value, _Group)
    return _Group(ranks=msgspec.convert(value, str | tuple[int, ...]))


def _calls(raw: list[Any], groups: _Groups, interning: Interning) -> Calls:
    raw = _in_issue_order(raw)
    stacks = [entry.pop("frames", None) if isinstance(entry, dict) else None for entry in raw]
    entries = _entries(raw)
    names = {name: interning.call_name(name) for name in set(map(_PROFILING_NAME, entries))}
    group_names = list(map(_PROCESS_GROUP, entries))
    named = {name: groups.named(*name) for name in set(group_names)}
    of = list(map(named.__getitem__, group_names))
    groups.by_local_id.update(zip(map(_PG_ID, entries), of, strict=True))
    kinds = _kinds(entries, names)
    sequence_ids = _sequence_ids(entries)
    frames = _frames(((index, stacks[index]) for index in _shown(entries, kinds)), interning)
    blocks: list[Sequence[_Entry] | bytes] = [
        entries[start : start + _BLOCK] for start in range(0, len(entries), _BLOCK)
    ]
    rows = _EntryRows(blocks, of, kinds, sequence_ids, names, frames)
    return Calls(columns(of, sequence_ids), kinds, Extremes.of(entries), rows)


class _EntryRows:
    """The entries of one dump, and what makes operations of them.

    Pickled, as between processes, they are packed by the block, unpacked when one is asked for: most never are.
    """

    __slots__ = ("_blocks", "_frames", "_groups", "_kinds", "_names", "_sequence_ids")

    def __init__(
        self,
        blocks: list[Sequence[_Entry] | bytes],
        groups: Sequence[ProcessGroup],
        kinds: Sequence[Kind],
        sequence_ids: Sequence[int],
        names: Mapping[str, CallName],
        frames: Mapping[int, tuple[Frame, ...] | bytes],
    ) -> None:
        self._blocks = blocks
        self._groups = groups
        self._kinds = kinds
        self._sequence_ids = sequence_ids
        self._names = names
        self._frames = frames

    def __reduce__(self) -> tuple[Any, ...]:
        frames = {index: _packed(stack) for index, stack in self._frames.items()}
        packed = list(map(_packed, self._blocks))
        return _EntryRows, (packed, self._groups, self._kinds, self._sequence_ids, self._names, frames)

    def operation(self, index: int) -> Operation:
        """Return the call at an index."""
        block = self._blocks[index // _BLOCK]
        if isinstance(block, bytes):
            block = self._blocks[index // _BLOCK] = _DECODE(block)
        entry = block[index % _BLOCK]
        name = self._names[entry.profiling_name]
        frames = self._frames.get(index, ())
        return Operation(
            record_id=entry.record_id,
            group=self._groups[index],
            kind=self._kinds[index],
            collective_seq_id=self._sequence_ids[index],
            p2p_seq_id=entry.p2p_seq_id,
            operation=name.operation,
            source=name.source,
            destination=name.destination,
            input_sizes=entry.input_sizes or (),
            output_sizes=entry.output_sizes or (),
            input_dtypes=entry.input_dtypes or (),
            output_dtypes=entry.output_dtypes or (),
            state=entry.state,
            retired=entry.retired,
            issued_ns=entry.issued_ns or None,
            started_ns=entry.started_ns or None,
            completed_ns=entry.completed_ns or None,
            timeout_ms=entry.timeout_ms,
            frames=_DECODE_FRAMES(frames) if isinstance(frames, bytes) else frames,
        )


def _packed(value: object) -> bytes:
    return value if isinstance(value, bytes) else _ENCODE(value)


_VALUES = itemgetter(*_KEYS)
_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(list[_Entry]).decode
_DECODE_FRAMES = msgspec.msgpack.Decoder(tuple[Frame, ...]).decode

# How many entries are packed together.
_BLOCK = 8


def _in_issue_order(raw: list[Any]) -> list[Any]:
    """Sort entries by record ID where that can be told; torch writes them in order."""
    try:
        return sorted(raw, key=itemgetter("record_id"))
    except (KeyError, TypeError):
        return raw


def _entries(raw: list[Any]) -> list[_Entry]:
    rows = _rows_of_known_keys(raw)
    if rows is None:
        # Keys of another version, or something wrong: look at all of it, and read what we know.
        _refuse_other_types(raw)
        rows = [_VALUES(_modern(index, entry)) for index, entry in enumerate(raw)]
    return msgspec.convert(rows, list[_Entry])


def _rows_of_known_keys(raw: list[Any]) -> list[tuple[Any, ...]] | None:
    """Return the values in the order of `_KEYS` where every entry has the keys of torch and no others, else None."""
    try:
        others = raw[0].keys() - _KEYS.keys()
        # All lengths are that of a row, and a row asks for each known key: so there are no unknown ones.
        rows = list(map(itemgetter(*_KEYS, *others), raw))
        return rows if others <= _OTHER_KEYS and set(map(len, raw)) == {len(rows[0])} else None
    except (AttributeError, IndexError, KeyError, TypeError):
        return None


def _modern(index: int, entry: Any) -> dict[str, Any]:
    """Bring an entry to the form of torch 2.4: earlier ones have other keys for the same things, or none."""
    if not isinstance(entry, dict):
        raise MalformedDump(f"not a dump: entry {index} is a {type(entry).__name__}, not a dict")
    modern = {"record_id": index, "collective_seq_id": entry.get("seq_id", 0)}
    modern["process_group"] = (str(entry.get("pg_id")), "")
    micros = entry.get("time_created_us")
    if isinstance(micros, int):
        modern["time_created_ns"] = micros * 1000
    return {**_KEYS, **modern, **entry}


def _kinds(entries: Sequence[_Entry], names: Mapping[str, CallName]) -> Sequence[Kind]:
    """Return the kind of each call; a closing `coalesced` entry is of that of the batch that it closes."""
    if not any(map(_IS_P2P, entries)) and not any(name.is_p2p for name in names.values()):
        return _ALL_COLLECTIVE * len(entries)
    kinds: list[Kind] = []
    # The number of the send/recv batch that may still be closed, by group.
    open_batches: dict[tuple[str, str], int] = {}
    for entry in entries:
        name = names[entry.profiling_name]
        is_p2p = entry.is_p2p or name.is_p2p
        if is_p2p:
            open_batches[entry.process_group] = entry.p2p_seq_id
        elif open_batches.pop(entry.process_group, None) == entry.p2p_seq_id:
            is_p2p = name.is_closing
        kinds.append("p2p" if is_p2p else "collective")
    return kinds


def _sequence_ids(entries: Sequence[_Entry]) -> Sequence[int]:
    """Return the collective sequence IDs, counted per group from 1.

    torchcomms counts from 0 over all groups of a process, which does not compare between ranks; a ring that still
    holds its first call can be counted anew.
    """
    written = list(map(_COLLECTIVE_SEQ_ID, entries))
    if not written or written != list(range(len(written))) or any(map(_IS_P2P, entries)):
        return written
    counts = dict.fromkeys(map(_PROCESS_GROUP, entries), 0)
    recounted = []
    for entry in entries:
        counts[entry.process_group] += 1
        recounted.append(counts[entry.process_group])
    return recounted


def _shown(entries: Sequence[_Entry], kinds: Sequence[Kind]) -> Iterator[int]:
    """Yield the calls that a report may show with their stack: the last one, and those a rank can be stuck in.

    Of the open collectives of a group that is the first that nobody gave up; a send or recv may be overtaken by others.
    """
    settled: set[tuple[str, str]] = set()
    for index in [index for index, state in enumerate(map(_STATE, entries)) if state != "completed"]:
        entry = entries[index]
        if kinds[index] == "p2p":
            yield index
        elif entry.process_group not in settled:
            yield index
            if not entry.retired:
                settled.add(entry.process_group)
    if entries:
        yield len(entries) - 1


def _frames(stacks: Iterable[tuple[int, Any]], interning: Interning) -> dict[int, tuple[Frame, ...]]:
    """Return the stack frames by index. The entries of one dump share frame objects: each is read once."""
    # The stacks hold the frames while this runs, so that an id stays that of its frame.
    known: dict[int, Frame] = {}
    frames: dict[int, tuple[Frame, ...]] = {}
    for index, stack in stacks:
        raw = msgspec.convert(stack or (), list[Any])
        for frame in raw:
            if id(frame) not in known:
                known[id(frame)] = interning.frame(frame)
        frames[index] = tuple(map(known.__getitem__, map(id, raw)))
    return frames


def _progress(pg_status: Mapping[Any, Any], groups: _Groups, warnings: list[str]) -> tuple[GroupProgress, ...]:
    """Map the counters, keyed by rank-local id, to groups, which go by name."""
    counters = {_local_id(key): msgspec.convert(value, _Status, strict=False) for key, value in pg_status.items()}
    mapped = _zip_in_order(counters, groups) or groups.by_local_id
    unmapped = sorted(counters.keys() - mapped.keys())
    if unmapped:
        ids = ", ".join(map(str, unmapped))
        warnings.append(f"pg_status has counters of local group ids that no call and no order explains: {ids}")
    return tuple(
        GroupProgress(
            group=mapped[local_id],
            last_enqueued=_counter(status.last_enqueued_collective),
            last_started=_counter(status.last_started_collective),
            last_completed=_counter(status.last_completed_collective),
        )
        for local_id, status in counters.items()
        if local_id in mapped
    )


def _local_id(key: object) -> int:
    try:
        return int(key)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError):
        raise MalformedDump(f"not a dump: pg_status has the key {str(key)[:40]!r}, not a number") from None


def _zip_in_order(counters: Mapping[int, _Status], groups: _Groups) -> dict[int | None, ProcessGroup] | None:
    """Return local id -> group by the order in which groups were made, or None where that cannot be trusted.

    Names and local ids both grow as groups are made. Trusted only where both lists have one length and agree with
    every entry.
    """
    names = groups.names()
    if len(names) != len(counters) or not all(name.isdecimal() for name in names):
        return None
    zipped = dict(zip(sorted(counters), sorted(names, key=int), strict=True))
    mapped: dict[int | None, ProcessGroup] = {local_id: groups.named(name) for local_id, name in zipped.items()}
    agrees = all(mapped.get(local_id) == group for local_id, group in groups.by_local_id.items())
    return mapped if agrees else None


def _counter(value: int) -> int | None:
    return value if value >= 0 else None


def _health(results: Mapping[str, Any]) -> dict[str, str]:
    return {
        device: msgspec.convert(result, _Health).status
        for device, result in results.items()
        if isinstance(result, dict)
    }
