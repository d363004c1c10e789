"""Dumps -> the object that holds their records."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from fr_exporter.model import Account, Frame, NodeRecords, Operation, ProcessGroup, RankDump, Reading
from fr_exporter.parsing.record.wire import (
    FORMAT,
    VERSION,
    CallColumn,
    CallDetail,
    CallRows,
    NodeObject,
    RankRecord,
    Signature,
    WireAccount,
    WireExtremes,
    WireReading,
    packed,
    unpacked,
)

K = TypeVar("K")

_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE_FIELDS = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode


def encode(records: NodeRecords, recent_calls: int) -> bytes:
    """Return the object of a node; equal records give equal bytes.

    Each dump must have its accounts. Of the calls that are done the last `recent_calls` of each rank are kept.
    """
    tables = _Tables()
    ranks = [_rank(dump, recent_calls, tables) for dump in sorted(records.dumps, key=lambda dump: dump.rank)]
    whole = NodeObject(
        format=FORMAT,
        version=VERSION,
        sent_ns=None,
        training_job=records.training_job,
        attempt=records.attempt,
        node=records.node,
        members=tables.members,
        groups=list(tables.groups),
        signatures=list(tables.signatures),
        states=list(tables.states),
        frames=list(tables.frames),
        stacks=list(tables.stacks),
        ranks=ranks,
        unreadable=[
            (each.rank, each.file, each.error, each.result) for each in records.unreadable if each.rank is not None
        ],
    )
    return packed(_ENCODE(whole))


def stamp(data: bytes, sent_ns: int) -> bytes:
    """Return an object with the time at which it is sent, by the clock of the sender."""
    return packed(_ENCODE({**_DECODE_FIELDS(unpacked(data)), "sent_ns": sent_ns}))


class _Tables:
    """What is repeated: each value once, with the index that stands for it."""

    def __init__(self) -> None:
        self.members: dict[str, list[int]] = {}
        self.groups: dict[tuple[str, str, str | None], int] = {}
        self.signatures: dict[Signature, int] = {}
        self.states: dict[tuple[str, bool], int] = {}
        self.frames: dict[tuple[str, str, int], int] = {}
        self.stacks: dict[tuple[int, ...], int] = {}

    def group(self, group: ProcessGroup) -> int:
        """Return the index of a group, and note its members."""
        if group.ranks is None:
            return _index(self.groups, (group.name, group.desc, None))
        if group.digest not in self.members:
            self.members[group.digest] = list(_runs(group.ranks))
        return _index(self.groups, (group.name, group.desc, group.digest))

    def signature(self, call: Operation) -> int:
        """Return the index of the signature of a call."""
        values = (getattr(call, name) for name in Signature.__struct_fields__)
        return _index(self.signatures, Signature(*values))

    def state(self, call: Operation) -> int:
        """Return the index of the state of a call."""
        return _index(self.states, (call.state, call.retired))

    def stack(self, frames: Iterable[Frame]) -> int:
        """Return the index of a stack."""
        indices = (_index(self.frames, (frame.name, frame.filename, frame.line)) for frame in frames)
        return _index(self.stacks, tuple(indices))


def _index(table: dict[K, int], value: K) -> int:
    return table.setdefault(value, len(table))


def _rank(dump: RankDump, recent_calls: int, tables: _Tables) -> RankRecord:
    accounts = (dump.accounts or {}).values()
    calls, history = _kept(dump, recent_calls)
    place_of = {call.record_id: place for place, call in enumerate(calls)}
    largest = [max(group.ranks) for group in dump.groups if group.ranks]
    extremes = dump.operations.extremes
    return RankRecord(
        rank=dump.rank,
        dump_version=dump.version,
        comm_lib_version=dump.comm_lib_version,
        dump_time_ns=dump.dump_time_ns,
        world_size=max(largest) + 1 if largest else None,
        health=dict(dump.health),
        warnings=dump.warnings,
        groups=list(map(tables.group, dump.groups)),
        has_counters=dump.has_counters,
        counters=[
            (tables.group(each.group), each.last_enqueued, each.last_started, each.last_completed)
            for each in dump.progress
        ],
        accounts=[_account(account, place_of, tables) for account in accounts],
        extremes=WireExtremes(*(getattr(extremes, name) for name in WireExtremes.__struct_fields__)),
        history=history,
        details=list(_details(calls, accounts, tables)),
        calls=msgspec.Raw(_ENCODE(_rows(calls, tables))),
    )


def _kept(dump: RankDump, recent_calls: int) -> tuple[Sequence[Operation], int | None]:
    """Return the open calls and the last ones of a rank, in issue order, and from where on they are its history."""
    calls = dump.operations
    open_ids = {call.record_id for call in _open_calls((dump.accounts or {}).values())}
    recent = range(max(0, len(calls) - recent_calls), len(calls))
    older = [call.place for call in calls.outlines() if call.place < recent.start and call.record_id in open_ids]
    kept = [*older, *recent]
    history = None if calls.history is None else bisect_left(kept, max(calls.history, recent.start))
    return list(calls.rows.operations(kept)), history


def _open_calls(accounts: Iterable[Account]) -> Iterator[Operation]:
    for account in accounts:
        yield from account.by_signs.open_calls
        if account.by_counter is not None:
            yield from account.by_counter.open_calls


def _rows(calls: Sequence[Operation], tables: _Tables) -> CallRows:
    places_of: dict[int, list[int]] = {}
    for place, call in enumerate(calls):
        places_of.setdefault(tables.group(call.group), []).append(place)
    return CallRows(
        record_ids=list(_steps(call.record_id for call in calls)),
        signatures=list(map(tables.signature, calls)),
        states=list(map(tables.state, calls)),
        columns=[
            CallColumn(
                group=group,
                places=list(_steps(places)),
                collective_seq_ids=list(_steps(calls[place].collective_seq_id for place in places)),
                p2p_seq_ids=list(_steps(calls[place].p2p_seq_id for place in places)),
            )
            for group, places in places_of.items()
        ],
    )


def _details(calls: Sequence[Operation], accounts: Collection[Account], tables: _Tables) -> Iterator[CallDetail]:
    open_ids = {call.record_id for call in _open_calls(accounts)}
    shown = {call.record_id for call in _fronts(accounts)} or {call.record_id for call in calls[-1:]}
    for place, call in enumerate(calls):
        if call.record_id in open_ids or place == len(calls) - 1:
            stack = tables.stack(call.frames) if call.frames and call.record_id in shown else None
            yield CallDetail(place, call.issued_ns, call.started_ns, call.completed_ns, call.timeout_ms, stack)


def _fronts(accounts: Collection[Account]) -> Iterator[Operation]:
    """Yield the calls that the rank can be stuck in: its oldest open one, by its counters and by its calls."""
    by_counter = [account.by_signs if account.has_transfers else account.by_counter for account in accounts]
    by_signs = [account.by_signs for account in accounts]
    for readings in (by_counter, by_signs):
        still_open = [call for reading in readings if reading is not None for call in reading.open_calls]
        known = [call for call in still_open if call.group.ranks is not None]
        first = min(known, key=lambda call: call.record_id, default=None)
        if first is not None:
            # A batch of sends and recvs stands or falls together.
            batch = (first.group, first.kind, first.p2p_seq_id)
            yield from (call for call in known if call is first or (call.group, "p2p", call.p2p_seq_id) == batch)


def _account(account: Account, place_of: Mapping[int, int], tables: _Tables) -> WireAccount:
    by_counter = None if account.by_counter is None else _reading(account.by_counter, place_of)
    by_signs = _reading(account.by_signs, place_of)
    return WireAccount(
        group=tables.group(account.by_signs.standing.group),
        has_transfers=account.has_transfers,
        newest_recorded=account.by_signs.standing.newest_recorded,
        by_counter=by_counter,
        by_signs=None if by_signs == by_counter else by_signs,
    )


def _reading(reading: Reading, place_of: Mapping[int, int]) -> WireReading:
    standing = reading.standing
    pairs = standing.pairs_done
    return WireReading(
        last_enqueued=standing.last_enqueued,
        last_completed=standing.last_completed,
        first_open=standing.first_open,
        open_operations=standing.open_operations,
        hides_transfers=standing.hides_transfers,
        pairs_done=None if pairs is None else [(*pair, count) for pair, count in pairs.items()],
        open_calls=list(_steps(place_of[call.record_id] for call in reading.open_calls)),
    )


def _runs(ranks: Sequence[int]) -> Iterator[int]:
    """Yield start, step and count of each run that a member list is made of."""
    start = 0
    while start < len(ranks):
        step = ranks[start + 1] - ranks[start] if start + 1 < len(ranks) else 1
        end = start + 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        yield from (ranks[start], step, end - start)
        start = end


def _steps(values: Iterable[int]) -> Iterator[int]:
    """Yield by how much each value is larger than the one before, the first than 0: `accumulate` gives them back."""
    last = 0
    for value in values:
        yield value - last
        last = value
