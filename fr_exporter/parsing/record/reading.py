"""An object of records -> the dumps that they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import BinaryIO

import msgspec

from fr_exporter.errors import MalformedDump, RejectedDump
from fr_exporter.model import (
    Account,
    Calls,
    Column,
    Extremes,
    Frame,
    GroupProgress,
    NodeRecords,
    Operation,
    Outline,
    ProcessGroup,
    RankDump,
    Reading,
    Standing,
    UnreadableFile,
)
from fr_exporter.parsing.interning import Interning
from fr_exporter.parsing.plain import Int
from fr_exporter.parsing.record.wire import (
    FORMAT,
    VERSION,
    CallDetail,
    CallRows,
    NodeObject,
    RankRecord,
    Signature,
    WireAccount,
    WireExtremes,
    WireReading,
    unpacked,
)

# The clocks of a node and of the store are compared in steps of half a minute, so that how long an upload took does not
# show: what windows and timeouts are measured in is longer, and two readers see the same times.
_CLOCK_STEP_NS = 30_000_000_000


# Counters, times and IDs fit in 64 bits, as in any dump.
_LIMIT = 2**63


class _Head(msgspec.Struct, frozen=True):
    format: str
    version: int


class _DumpTime(msgspec.Struct, frozen=True):
    dump_time_ns: Int | None


class _DumpTimes(msgspec.Struct, frozen=True):
    sent_ns: Int | None
    ranks: list[_DumpTime]


_DECODE_HEAD = msgspec.msgpack.Decoder(_Head).decode
_DECODE_DUMP_TIMES = msgspec.msgpack.Decoder(_DumpTimes).decode
_DECODE_OBJECT = msgspec.msgpack.Decoder(NodeObject).decode
_DECODE_ROWS = msgspec.msgpack.Decoder(CallRows).decode


def load(file: BinaryIO) -> object:
    """Return the plain data that an open file of records holds.

    Raises:
        PartialDump: it is cut short, or damaged.
        RejectedDump: it is larger than the records of any node.
        MalformedDump: it holds something else.
    """
    try:
        return msgspec.msgpack.decode(unpacked(file.read()))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedDump(f"not records: {error}") from None


def decode(data: bytes, interning: Interning, *, source: str, mtime_ns: int) -> NodeRecords:
    """Return what an object holds, with its times by the clock of the store.

    `source` names the object; `mtime_ns` is when it was written, by the clock of the store.

    Raises:
        DumpError: as `load`; RejectedDump also where its version is not known.
    """
    content = unpacked(data)
    try:
        head = _DECODE_HEAD(content)
        if (head.format, head.version) != (FORMAT, VERSION):
            raise RejectedDump(f"refused: {head.format[:40]!r} version {head.version}, known is {FORMAT!r} {VERSION}")
        whole = _DECODE_OBJECT(content)
        shared = _Shared.of(whole, interning, _clock_offset(whole.sent_ns, mtime_ns))
        return NodeRecords(
            training_job=whole.training_job,
            attempt=whole.attempt,
            node=whole.node,
            dumps=tuple(_dump(rank, whole.node, f"{source}#{rank.rank}", shared) for rank in whole.ranks),
            unreadable=tuple(
                UnreadableFile(file=file, rank=rank, error=error, result=result)
                for rank, file, error, result in whole.unreadable
            ),
            clock_offset_ns=shared.clock_offset_ns,
        )
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, ValueError) as error:
        raise MalformedDump(f"not records: {error}") from None


def newest_dump_time(data: bytes, mtime_ns: int) -> int | None:
    """Return when the newest dump in an object was made, by the clock of the store; None where it does not tell.

    `mtime_ns` is when the object was written. Raises DumpError, as `load`.
    """
    try:
        times = _DECODE_DUMP_TIMES(unpacked(data))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedDump(f"not records: {error}") from None
    offset_ns = _clock_offset(times.sent_ns, mtime_ns)
    return max((rank.dump_time_ns + offset_ns for rank in times.ranks if rank.dump_time_ns is not None), default=None)


def _clock_offset(sent_ns: int | None, mtime_ns: int) -> int:
    return 0 if sent_ns is None else round((mtime_ns - sent_ns) / _CLOCK_STEP_NS) * _CLOCK_STEP_NS


@dataclass(frozen=True, slots=True)
class _Shared:
    """The tables of an object, as values, and what to add to its times."""

    groups: Sequence[ProcessGroup]
    signatures: Sequence[Signature]
    states: Sequence[tuple[str, bool]]
    stacks: Sequence[tuple[Frame, ...]]
    clock_offset_ns: int

    @classmethod
    def of(cls, whole: NodeObject, interning: Interning, clock_offset_ns: int) -> _Shared:
        frames = [Frame(*frame) for frame in whole.frames]
        return cls(
            groups=interning.groups_by_digest(whole.groups, whole.members),
            signatures=list(map(interning.shared, whole.signatures)),
            states=whole.states,
            stacks=[tuple(frames[index] for index in stack) for stack in whole.stacks],
            clock_offset_ns=clock_offset_ns,
        )

    def here(self, time_ns: int | None) -> int | None:
        """Return a time of the node by the clock of the store."""
        return None if time_ns is None else time_ns + self.clock_offset_ns


def _dump(record: RankRecord, node: str, source: str, shared: _Shared) -> RankDump:
    packed_rows = bytes(record.calls)
    rows = _Rows.of(packed_rows, shared)
    told = {detail.place: rows.operation(detail.place, detail) for detail in record.details}
    progress = tuple(GroupProgress(shared.groups[group], *counts) for group, *counts in record.counters)
    readings = _Readings({each.group.key: each for each in progress}, told)
    return RankDump(
        rank=record.rank,
        node=node,
        source=source,
        version=record.dump_version,
        comm_lib_version=record.comm_lib_version,
        groups=tuple(shared.groups[group] for group in record.groups),
        progress=progress,
        operations=Calls(
            by_group=rows.by_group,
            kinds=[shared.signatures[index].kind for index in rows.signatures],
            extremes=_extremes(record.extremes, shared),
            history=record.history,
            rows=_PackedRows(packed_rows, shared, told),
        ),
        health=record.health,
        dump_time_ns=shared.here(record.dump_time_ns),
        has_counters=record.has_counters,
        warnings=(*record.warnings, *_clock_warning(node, shared.clock_offset_ns)),
        accounts={shared.groups[account.group].key: readings.account(account, shared) for account in record.accounts},
    )


def _clock_warning(node: str, offset_ns: int) -> Iterator[str]:
    if offset_ns:
        off = f"{abs(offset_ns) // 10**9} s {'behind' if offset_ns > 0 else 'ahead of'}"
        yield f"the clock of node {node} is {off} that of the store; its times are corrected"


def _extremes(extremes: WireExtremes, shared: _Shared) -> Extremes:
    return Extremes(
        last_record_id=extremes.last_record_id,
        newest_issue_ns=shared.here(extremes.newest_issue_ns),
        newest_time_ns=shared.here(extremes.newest_time_ns),
        longest_timeout_ms=extremes.longest_timeout_ms,
        record_starts=extremes.record_starts,
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """The calls of one rank, for as long as they are looked at."""

    shared: _Shared
    by_group: Mapping[str, Column]
    record_ids: Sequence[int]
    signatures: Sequence[int]
    states: Sequence[tuple[str, bool]]
    groups: Sequence[ProcessGroup]
    collective_seq_ids: Sequence[int]
    p2p_seq_ids: Sequence[int]

    @classmethod
    def of(cls, packed: bytes, shared: _Shared) -> _Rows:
        """Unpack them. Raises LookupError, ValueError or DecodeError where they do not fit together."""
        rows = _DECODE_ROWS(packed)
        by_group: dict[str, Column] = {}
        placed: dict[int, tuple[ProcessGroup, int, int]] = {}
        for column in rows.columns:
            group = shared.groups[column.group]
            places, seq_ids = list(accumulate(column.places)), list(accumulate(column.collective_seq_ids))
            by_group[group.key] = Column(places, seq_ids)
            numbers = zip(seq_ids, accumulate(column.p2p_seq_ids), strict=True)
            placed.update((place, (group, *of_kind)) for place, of_kind in zip(places, numbers, strict=True))
        whole = [placed[place] for place in range(len(rows.record_ids))]
        lengths = {len(whole), len(placed), len(rows.signatures), len(rows.states)}
        if lengths != {sum(len(column.indices) for column in by_group.values())}:
            raise ValueError("columns of calls do not fit together")
        groups, collective_seq_ids, p2p_seq_ids = zip(*whole, strict=True) if whole else ((), (), ())
        return cls(
            shared=shared,
            by_group=by_group,
            record_ids=_checked(list(accumulate(rows.record_ids))),
            signatures=rows.signatures,
            states=list(map(shared.states.__getitem__, rows.states)),
            groups=groups,
            collective_seq_ids=_checked(collective_seq_ids),
            p2p_seq_ids=_checked(p2p_seq_ids),
        )

    def outline(self, index: int) -> Outline:
        """Return the outline of the call at an index."""
        signature = self.shared.signatures[self.signatures[index]]
        return Outline(
            index,
            self.record_ids[index],
            signature.kind,
            self.collective_seq_ids[index],
            self.p2p_seq_ids[index],
            signature.operation,
            signature.source,
            signature.destination,
            *self.states[index],
        )

    def operation(self, index: int, detail: CallDetail | None) -> Operation:
        """Return the call at an index."""
        signature = self.shared.signatures[self.signatures[index]]
        state, retired = self.states[index]
        here = self.shared.here
        return Operation(
            record_id=self.record_ids[index],
            group=self.groups[index],
            kind=signature.kind,
            collective_seq_id=self.collective_seq_ids[index],
            p2p_seq_id=self.p2p_seq_ids[index],
            operation=signature.operation,
            source=signature.source,
            destination=signature.destination,
            input_sizes=signature.input_sizes,
            output_sizes=signature.output_sizes,
            input_dtypes=signature.input_dtypes,
            output_dtypes=signature.output_dtypes,
            state=state,
            retired=retired,
            issued_ns=None if detail is None else here(detail.issued_ns),
            started_ns=None if detail is None else here(detail.started_ns),
            completed_ns=None if detail is None else here(detail.completed_ns),
            timeout_ms=None if detail is None else detail.timeout_ms,
            frames=() if detail is None or detail.stack is None else self.shared.stacks[detail.stack],
        )


def _checked(numbers: Sequence[int]) -> Sequence[int]:
    """Return numbers that fit in 64 bits. Raises ValueError where one does not."""
    if numbers and not -_LIMIT <= min(numbers) <= max(numbers) < _LIMIT:
        raise ValueError("a number does not fit in 64 bits")
    return numbers


@dataclass(frozen=True, slots=True)
class _PackedRows:
    """Calls as they came: of thousands of ranks a few are looked at, so they stay packed until then.

    The calls that details are `told` of are those that are looked at most.
    """

    packed: bytes
    shared: _Shared
    told: Mapping[int, Operation]

    def operations(self, indices: Iterable[int]) -> Iterator[Operation]:
        """Return the calls at some indices."""
        rows = None
        for index in indices:
            call = self.told.get(index)
            if call is None:
                rows = rows or _Rows.of(self.packed, self.shared)
                call = rows.operation(index, None)
            yield call

    def outlines(self, indices: Iterable[int]) -> list[Outline]:
        """Return the outlines of the calls at some indices."""
        return list(map(_Rows.of(self.packed, self.shared).outline, indices))


@dataclass(frozen=True, slots=True)
class _Readings:
    """What the accounts of one rank are made of."""

    counters: Mapping[str, GroupProgress]
    told: Mapping[int, Operation]

    def account(self, account: WireAccount, shared: _Shared) -> Account:
        """Return the account of one group. Raises ValueError where nothing is told of it."""
        group = shared.groups[account.group]
        told = account.by_counter if account.by_signs is None else account.by_signs
        if told is None:
            raise ValueError(f"nothing is told of process group {group.name[:40]!r}")
        counted = account.by_counter
        return Account(
            by_counter=None if counted is None else self._reading(counted, group, account.newest_recorded),
            by_signs=self._reading(told, group, account.newest_recorded),
            has_transfers=account.has_transfers,
        )

    def _reading(self, reading: WireReading, group: ProcessGroup, newest_recorded: int | None) -> Reading:
        pairs = reading.pairs_done
        standing = Standing(
            group=group,
            last_enqueued=reading.last_enqueued,
            last_completed=reading.last_completed,
            first_open=reading.first_open,
            open_operations=reading.open_operations,
            counters=self.counters.get(group.key),
            newest_recorded=newest_recorded,
            pairs_done=None if pairs is None else {(source, target): count for source, target, count in pairs},
            hides_transfers=reading.hides_transfers,
        )
        return Reading(standing, [self.told[place] for place in accumulate(reading.open_calls)])
