"""The entries of one dump -> its calls, in the order the rank issued them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

import msgspec

from fr_exporter.model import Calls, Extremes, Frame, Kind, Operation, Outline, ProcessGroup, columns, whole_history
from fr_exporter.parsing.groups import Groups
from fr_exporter.parsing.interning import CallName, Interning
from fr_exporter.parsing.plain import Int, refuse_other_types

Shapes = tuple[tuple[int, ...], ...]
Dtypes = tuple[str, ...]
T = TypeVar("T")

_ALL_COLLECTIVE: tuple[Kind] = ("collective",)
_COLLECTIVE_SEQ_ID = attrgetter("collective_seq_id")
_IS_P2P = attrgetter("is_p2p")
_PG_ID = attrgetter("pg_id")
_PROCESS_GROUP = attrgetter("process_group")
_PROFILING_NAME = attrgetter("profiling_name")
_STATE = attrgetter("state")
_OUTLINED = tuple(map(attrgetter, ("record_id", "p2p_seq_id", "profiling_name", "state", "retired")))


class _Entry(msgspec.Struct, frozen=True, gc=False):
    """One element of `entries`, of torch 2.4 and later; earlier ones are brought to this form first.

    Sizes and dtypes are taken as they are: most of them are never looked at.
    """

    record_id: Int
    profiling_name: str
    process_group: tuple[str, str]
    collective_seq_id: Int
    p2p_seq_id: Int = 0
    pg_id: Int | None = None
    issued_ns: Int | None = msgspec.field(default=None, name="time_created_ns")
    started_ns: Int | None = msgspec.field(default=None, name="time_discovered_started_ns")
    completed_ns: Int | None = msgspec.field(default=None, name="time_discovered_completed_ns")
    input_sizes: Any = ()
    output_sizes: Any = ()
    input_dtypes: Any = ()
    output_dtypes: Any = ()
    state: str = ""
    retired: bool = False
    timeout_ms: Int | None = None
    is_p2p: bool = False


class _KnownEntry(_Entry, frozen=True, gc=False, forbid_unknown_fields=True):
    """An entry with the keys of torch and no others, so that its types are checked as it is converted."""

    op_id: Any = None
    duration_ms: Any = None
    thread_id: Any = None
    thread_name: Any = None


def read_calls(raw: list[Any], groups: Groups, interning: Interning) -> Calls:
    """Return the calls that the entries of a dump record, and tell `groups` which local id is whose.

    Raises:
        msgspec.ValidationError: an entry lacks a key or has another type than a dump's.
        RejectedDump: something in it is no plain data.
    """
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
    frames = {index: interning.stack(stacks[index]) for index in _shown(entries, kinds)}
    blocks: list[Sequence[_Entry] | bytes] = [
        entries[start : start + _BLOCK] for start in range(0, len(entries), _BLOCK)
    ]
    rows = _EntryRows(blocks, of, kinds, sequence_ids, names, frames)
    return Calls(columns(of, sequence_ids), kinds, Extremes.of(entries), whole_history(entries), rows)


class _EntryRows:
    """The entries of one dump, and what makes operations of them.

    Pickled, as between processes, they are packed by the block, unpacked when one is asked for: most never are. What
    outlines need is packed once more, for all entries together.
    """

    __slots__ = ("_blocks", "_frames", "_groups", "_kinds", "_names", "_outlined", "_sequence_ids")

    def __init__(
        self,
        blocks: list[Sequence[_Entry] | bytes],
        groups: Sequence[ProcessGroup],
        kinds: Sequence[Kind],
        sequence_ids: Sequence[int],
        names: Mapping[str, CallName],
        frames: Mapping[int, tuple[Frame, ...]],
        outlined: bytes | None = None,
    ) -> None:
        self._blocks = blocks
        self._groups = groups
        self._kinds = kinds
        self._sequence_ids = sequence_ids
        self._names = names
        self._frames = frames
        self._outlined = outlined

    def __reduce__(self) -> tuple[Any, ...]:
        blocks = [
            block if isinstance(block, bytes) else _ENCODE(list(map(msgspec.structs.astuple, block)))
            for block in self._blocks
        ]
        outlined = _ENCODE(self._outline_columns())
        return _EntryRows, (blocks, self._groups, self._kinds, self._sequence_ids, self._names, self._frames, outlined)

    def _block(self, number: int) -> Sequence[_Entry]:
        block = self._blocks[number]
        if isinstance(block, bytes):
            block = self._blocks[number] = [_Entry(*values[:_FIELDS]) for values in _DECODE(block)]
        return block

    def _outline_columns(self) -> Sequence[Sequence[Any]]:
        if self._outlined is not None:
            return _DECODE(self._outlined)
        entries = [entry for number in range(len(self._blocks)) for entry in self._block(number)]
        return [list(map(value_of, entries)) for value_of in _OUTLINED]

    def outlines(self, indices: Iterable[int]) -> list[Outline]:
        """Return the outlines of the calls at some indices."""
        record_ids, p2p_seq_ids, profiling_names, states, retired = self._outline_columns()
        outlines: list[Outline] = []
        for index in indices:
            name = self._names[profiling_names[index]]
            outlines.append(
                Outline(
                    index,
                    record_ids[index],
                    self._kinds[index],
                    self._sequence_ids[index],
                    p2p_seq_ids[index],
                    name.operation,
                    name.source,
                    name.destination,
                    states[index],
                    retired[index],
                )
            )
        return outlines

    def operations(self, indices: Iterable[int]) -> Iterator[Operation]:
        """Return the calls at some indices."""
        return map(self._operation, indices)

    def _operation(self, index: int) -> Operation:
        entry = self._block(index // _BLOCK)[index % _BLOCK]
        name = self._names[entry.profiling_name]
        return Operation(
            record_id=entry.record_id,
            group=self._groups[index],
            kind=self._kinds[index],
            collective_seq_id=self._sequence_ids[index],
            p2p_seq_id=entry.p2p_seq_id,
            operation=name.operation,
            source=name.source,
            destination=name.destination,
            input_sizes=_as(Shapes, entry.input_sizes),
            output_sizes=_as(Shapes, entry.output_sizes),
            input_dtypes=_as(Dtypes, entry.input_dtypes),
            output_dtypes=_as(Dtypes, entry.output_dtypes),
            state=entry.state,
            retired=entry.retired,
            issued_ns=entry.issued_ns or None,
            started_ns=entry.started_ns or None,
            completed_ns=entry.completed_ns or None,
            timeout_ms=entry.timeout_ms,
            frames=self._frames.get(index, ()),
        )


def _as(wanted: type[tuple[T, ...]], value: Any) -> tuple[T, ...]:
    """Return sizes or dtypes, none where they are not what they should be: the call itself is worth more."""
    try:
        return msgspec.convert(value or (), wanted)
    except msgspec.ValidationError:
        return ()


_FIELDS = len(_Entry.__struct_fields__)
_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(list[list[Any]]).decode

# How many entries are packed together.
_BLOCK = 8


def _in_issue_order(raw: list[Any]) -> list[Any]:
    """Sort entries by record ID where that can be told; torch writes them in order."""
    try:
        return sorted(raw, key=itemgetter("record_id"))
    except (KeyError, TypeError):
        return raw


def _entries(raw: list[Any]) -> Sequence[_Entry]:
    try:
        return msgspec.convert(raw, list[_KnownEntry])
    except msgspec.ValidationError:
        # Keys of another version, or something wrong: look at all of it, and read what we know.
        refuse_other_types(raw)
        return msgspec.convert([_modern(index, entry) for index, entry in enumerate(raw)], list[_Entry])


def _modern(index: int, entry: Any) -> Any:
    """Bring an entry to the form of torch 2.4: earlier ones have other keys for the same things, or none."""
    if not isinstance(entry, dict):
        return entry
    # One number counted collectives, sends and recvs.
    number = entry.get("seq_id", 0)
    modern = {"record_id": index, "collective_seq_id": number, "p2p_seq_id": number}
    modern["process_group"] = (str(entry.get("pg_id")), "")
    micros = entry.get("time_created_us")
    if isinstance(micros, int):
        modern["time_created_ns"] = micros * 1000
    return modern | entry


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
