"""How far each rank got: which of its calls are done, which are open, and which one it is stuck in.

"Not completed" alone is never a hang: calls inside a coalesced batch stay `scheduled` for ever, and gloo never
completes anything. Where a rank's counters count collectives only they decide; elsewhere several signs together do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from fr_exporter.analysis.operations import has_timed_out, is_done_by_retirement, is_done_by_state, is_rooted
from fr_exporter.model import (
    Account,
    Calls,
    DumpSet,
    GroupProgress,
    Kind,
    Operation,
    Outline,
    Pair,
    ProcessGroup,
    RankDump,
    Reading,
    Standing,
)

_SECOND_NS = 1_000_000_000
_DAY_NS = 86_400 * _SECOND_NS


@dataclass(frozen=True, slots=True)
class Front:
    """A call a rank is stuck in. `operation` is None where only the counters show it: it is older than the ring."""

    group: ProcessGroup
    kind: Kind
    seq_id: int
    operation: Operation | None

    @property
    def issued_ns(self) -> int | None:
        """When this rank issued the call, None where unknown."""
        return None if self.operation is None else self.operation.issued_ns


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank: its standing in each group by group key, its oldest open calls in issue order, and its fronts.

    `fronts` is empty where the rank is not stuck. It holds several where the rank is stuck in a batch of send/recv
    (`certain`), or in one of several calls older than the ring whose order is unknown (not `certain`). `in_flight` is
    the oldest open call where its age excuses the rank; `is_young` tells that its age would, were every dump there.
    `age_known` tells whether the dump's time can be trusted. `timing` tells that this rank records starts, as far as
    its dump can show. `unmapped` is the oldest open call of a group whose members are unknown: it never is a front.
    """

    dump: RankDump
    standings: Mapping[str, Standing]
    open_calls: tuple[Operation, ...]
    fronts: tuple[Front, ...]
    certain: bool
    in_flight: Operation | None
    is_young: bool
    age_known: bool
    timing: bool
    unmapped: Operation | None

    @property
    def front(self) -> Front | None:
        """The call the rank is stuck in, the first where there are several; None where it is not stuck."""
        return self.fronts[0] if self.fronts else None


@dataclass(frozen=True, slots=True)
class AgeRule:
    """When an open call counts as in flight: younger than `min_open_age_ns` and than half its timeout.

    `excuses` is False while an expected rank has no dump: a crash dumps at once.
    """

    min_open_age_ns: int
    excuses: bool


def rank_states(dump_set: DumpSet, rule: AgeRule) -> dict[int, RankState]:
    """Return the state of each rank with a dump, by rank."""
    dumps = dump_set.dumps
    # Those that any rank uses for send/recv: their counters do not compare.
    mixed = frozenset[str]().union(*map(_p2p_groups, dumps.values()))
    return {rank: _rank_state(dumps[rank], mixed, rule) for rank in sorted(dumps)}


def with_accounts(dump: RankDump) -> RankDump:
    """Return a dump with what its ring tells of each group, whatever the other ranks' dumps show."""
    calls, counters = dump.operations, _counters(dump)
    p2p_groups = calls.p2p_groups()
    accounts = {
        key: Account(
            by_counter=_by_counter(counters[key], calls) if key in counters else None,
            by_signs=_by_signs(key, counters.get(key), calls),
            has_transfers=key in p2p_groups,
        )
        for key in _group_keys(dump)
    }
    return replace(dump, accounts=accounts)


def _p2p_groups(dump: RankDump) -> set[str]:
    """Return the keys of the groups that a rank uses for send/recv."""
    if dump.accounts is None:
        return dump.operations.p2p_groups()
    return {key for key, account in dump.accounts.items() if account.has_transfers}


def _rank_state(dump: RankDump, mixed: frozenset[str], rule: AgeRule) -> RankState:
    read = _readings(dump, mixed) if dump.accounts is None else _recorded(dump.accounts, mixed)
    standings: dict[str, Standing] = {}
    open_calls: list[Operation] = []
    for key, (standing, still_open) in read:
        standings[key] = replace(standing, mixed=True) if key in mixed else standing
        open_calls.extend(still_open)
    open_calls.sort(key=lambda call: call.record_id)
    return _with_fronts(dump, standings, tuple(open_calls), rule)


def _readings(dump: RankDump, mixed: frozenset[str]) -> Iterator[tuple[str, Reading]]:
    calls, counters = dump.operations, _counters(dump)
    for key in _group_keys(dump):
        counter = counters.get(key)
        if counter is not None and key not in mixed:
            yield key, _by_counter(counter, calls)
        else:
            yield key, _by_signs(key, counter, calls)


def _recorded(accounts: Mapping[str, Account], mixed: frozenset[str]) -> Iterator[tuple[str, Reading]]:
    for key, account in accounts.items():
        counted = None if key in mixed else account.by_counter
        yield key, account.by_signs if counted is None else counted


def _counters(dump: RankDump) -> dict[str, GroupProgress]:
    return {progress.group.key: progress for progress in dump.progress}


def _group_keys(dump: RankDump) -> list[str]:
    """Return the keys of the groups that a dump tells of; 9 before 10, whatever order it was written in."""
    keys = {*(progress.group.key for progress in dump.progress), *dump.operations.by_group}
    return sorted(keys, key=lambda key: (len(key), key))


def _by_counter(counter: GroupProgress, calls: Calls) -> Reading:
    """Let the counter decide: calls at or below last completed are done, those above it open, whatever their state.

    Where a dump leaves completed calls out, one that it lacks is done: the watchdog counts it a moment later.
    A group can have thousands open, so return only as many of them as anybody asks for: the oldest ones, up to the
    first without a root.
    """
    key, done = counter.group.key, counter.last_completed or 0
    newest = _newest_recorded(calls, key)
    above = [] if newest is None or newest <= done else calls.above(key, done)
    # The threads of a gloo group may count two calls in the wrong order, so that the counter ends one too low.
    while above and is_done_by_retirement(calls[above[0]]):
        done = calls[above.pop(0)].collective_seq_id
    enqueued = max(counter.last_enqueued or 0, newest if above and newest is not None else 0)
    if not calls.hold_all():
        done = calls[above[0]].collective_seq_id - 1 if above else enqueued
    standing = Standing(
        group=counter.group,
        last_enqueued=enqueued,
        last_completed=done,
        first_open=done + 1 if enqueued > done else None,
        open_operations=max(0, enqueued - done),
        counters=counter,
        newest_recorded=newest,
    )
    oldest: list[Operation] = []
    for index in above:
        oldest.append(calls[index])
        if not is_rooted(oldest[-1]):
            break
    return Reading(standing, oldest)


def _newest_recorded(calls: Calls, key: str) -> int | None:
    column = calls.by_group.get(key)
    return None if column is None else max(column.collective_seq_ids)


def _by_signs(key: str, counter: GroupProgress | None, all_calls: Calls) -> Reading:
    calls = all_calls.outlines(key)
    done = _last_done_collective(calls)
    p2p_done = _done_p2p(counter, calls, _closed_unseen(counter, calls, all_calls))
    still_open = [
        call
        for call in calls
        if (call.record_id not in p2p_done if call.kind == "p2p" else call.collective_seq_id > done)
    ]
    open_collectives = [call.collective_seq_id for call in still_open if call.kind == "collective"]
    enqueued = max((call.collective_seq_id for call in calls), default=0)
    return Reading(
        Standing(
            group=all_calls[calls[-1].place].group if counter is None else counter.group,
            last_enqueued=enqueued,
            last_completed=done,
            first_open=min(open_collectives, default=None),
            open_operations=len(still_open),
            counters=counter,
            newest_recorded=_newest_recorded(all_calls, key),
            pairs_done=_pairs_done(counter, calls, p2p_done),
            hides_transfers=counter is not None and _hides_transfers(counter, all_calls),
        ),
        [all_calls[call.place] for call in still_open],
    )


def _closed_unseen(counter: GroupProgress | None, calls: list[Outline], all_calls: Calls) -> set[int]:
    """Return the numbers of the batches whose closing entry a dump of active calls has left out, as completed."""
    parts = [call for call in calls if call.kind == "p2p" and not _is_closing(call)]
    last_part = {call.p2p_seq_id: call.record_id for call in parts}
    # Without batches what follows a send or recv is some other call.
    if all_calls.hold_all() or len(last_part) == len(parts):
        return set()
    # A group's collectives and batches run in order: where its last call was left out, all are done.
    if calls[-1] is parts[-1] and counter is not None and counter.last_enqueued != parts[-1].p2p_seq_id:
        return set(last_part)
    present = {call.record_id for call in all_calls.outlines()}
    newest = max(present)
    return {number for number, last in last_part.items() if last < newest and last + 1 not in present}


def _done_p2p(counter: GroupProgress | None, calls: list[Outline], closed: set[int]) -> set[int]:
    """Return the record IDs of the send/recv calls (and their closing entries) of one group that are done.

    `closed` are the numbers of batches that are known to be done.
    """
    p2p = [call for call in calls if call.kind == "p2p"]
    done_by_counter = _p2p_counter(counter, calls)
    # A batch runs on the group's own stream, before each later collective.
    in_order_until = max((c.record_id for c in calls if c.kind == "collective" and is_done_by_state(c)), default=-1)
    batches = Counter(call.p2p_seq_id for call in p2p if not _is_closing(call))
    states_tell = _single_calls_complete(counter, p2p)
    done: set[int] = set()
    closed_batches = set(closed)
    done_pairs: set[Pair] = set()
    # Backwards: what is known of later calls tells of earlier ones.
    for call in reversed(p2p):
        pair = (call.source, call.destination)
        is_closing = _is_closing(call)
        in_batch = is_closing or batches[call.p2p_seq_id] > 1 or not states_tell
        if (
            is_done_by_state(call)
            or (in_batch and (call.p2p_seq_id <= done_by_counter or call.record_id < in_order_until))
            or call.p2p_seq_id in closed_batches
            or (not is_closing and pair in done_pairs)
        ):
            done.add(call.record_id)
            if is_closing:
                closed_batches.add(call.p2p_seq_id)
            else:
                done_pairs.add(pair)
    return done


def _single_calls_complete(counter: GroupProgress | None, p2p: list[Outline]) -> bool:
    """Tell whether calls outside of batches show by their state when they are done.

    Then the counter, which may have counted a later call to another peer, says nothing of an earlier one.
    """
    if any(call.state != "scheduled" and not _is_closing(call) for call in p2p):
        return True
    if not p2p:
        return False
    # A call that is not there, between others or after them, was left out as completed, as none of a batch ever is.
    first, last = p2p[0].p2p_seq_id, p2p[-1].p2p_seq_id
    has_gaps = len({call.p2p_seq_id for call in p2p}) < last - first + 1
    return has_gaps or (counter is not None and (counter.last_enqueued or 0) > last)


def _pairs_done(counter: GroupProgress | None, calls: list[Outline], done: set[int]) -> dict[Pair, int] | None:
    """Count the sends and recvs of each pair that are done.

    Return None where the ring does not hold the group's first, or nothing shows when they are done.
    """
    p2p = [call for call in calls if call.kind == "p2p"]
    numbers = {call.p2p_seq_id for call in p2p}
    if not numbers or numbers != set(range(1, len(numbers) + 1)):
        return None
    if not (any(map(_is_closing, p2p)) or _single_calls_complete(counter, p2p) or _p2p_counter(counter, calls)):
        return None
    return Counter((call.source, call.destination) for call in p2p if call.record_id in done and not _is_closing(call))


def _is_closing(call: Outline | Operation) -> bool:
    return call.source is None and call.destination is None and call.operation.endswith("coalesced")


def _p2p_counter(counter: GroupProgress | None, calls: list[Outline]) -> int:
    """Return last completed where it counts send/recv, else 0.

    The counters are those of the group's last call of either kind. They count send/recv when that call is one, unless
    last completed still reads as the number of a collective: the one before it, or the last that is done.
    """
    if counter is None or counter.last_completed is None or not calls or calls[-1].kind != "p2p":
        return 0
    last, enqueued, completed = calls[-1], counter.last_enqueued or 0, counter.last_completed
    is_collective = completed in (last.collective_seq_id, _last_done_collective(calls))
    return 0 if enqueued < last.p2p_seq_id or is_collective else completed


def _last_done_collective(calls: Iterable[Outline]) -> int:
    """Return the last collective that its entry shows done, 0 for none."""
    return max(
        (call.collective_seq_id for call in calls if call.kind == "collective" and is_done_by_state(call)), default=0
    )


def _with_fronts(
    dump: RankDump,
    standings: Mapping[str, Standing],
    open_calls: tuple[Operation, ...],
    rule: AgeRule,
) -> RankState:
    known = [call for call in open_calls if call.group.ranks is not None]
    older_than_ring = tuple(_older_than_ring(standings, known))
    hides_transfers = any(standing.mixed and standing.hides_transfers for standing in standings.values())
    fronts = older_than_ring or tuple(_front_batch(known))
    age_known = _is_plausible(dump.dump_time_ns, dump.operations.extremes.newest_time_ns)
    in_flight = None
    # A rank that has only just issued a call is not stuck in one that its ring has lost already.
    oldest = dump.operations[-1] if older_than_ring and dump.operations else next(iter(known), None)
    is_young = oldest is not None and age_known and _is_young(oldest, dump.dump_time_ns, rule)
    if is_young and rule.excuses:
        fronts, in_flight = (), oldest
    unmapped = next((call for call in open_calls if call.group.ranks is None), None)
    if unmapped is not None and age_known and rule.excuses and _is_young(unmapped, dump.dump_time_ns, rule):
        unmapped = None
    return RankState(
        dump=dump,
        standings=standings,
        open_calls=open_calls,
        fronts=fronts,
        certain=len(older_than_ring) < 2 and not hides_transfers,
        in_flight=in_flight,
        is_young=is_young,
        age_known=age_known,
        timing=_may_record_starts(dump),
        unmapped=unmapped,
    )


def _older_than_ring(standings: Mapping[str, Standing], open_calls: list[Operation]) -> Iterator[Front]:
    """Yield the open calls that only the counters show, because the ring has lost them.

    Where the ring ends with an earlier call of the group, the call was issued between the reading of both: it is new.
    """
    oldest: dict[str, int] = {}
    for call in open_calls:
        oldest.setdefault(call.group.key, call.collective_seq_id)
    for key, standing in standings.items():
        first = standing.first_open
        if standing.counters is None or standing.mixed or first is None or standing.group.ranks is None:
            continue
        is_newer = standing.newest_recorded is not None and standing.newest_recorded < first
        if oldest.get(key, first + 1) > first and not is_newer:
            yield Front(standing.group, "collective", first, None)


def _hides_transfers(counter: GroupProgress, calls: Calls) -> bool:
    """Tell whether the counter of a send/recv group shows open calls that the ring has lost."""
    completed = counter.last_completed or 0
    if (counter.last_enqueued or 0) <= completed or not calls.hold_all():
        return False
    column = calls.by_group.get(counter.group.key)
    return column is None or _begins_after(calls, column.indices[0], completed + 1)


def _begins_after(calls: Calls, index: int, number: int) -> bool:
    """Tell whether a ring that holds a call as the oldest of its group has lost a send/recv call or a part of it."""
    oldest = calls[index]
    begins_within = index == 0 and _is_closing(oldest)
    return oldest.p2p_seq_id > number or (begins_within and oldest.p2p_seq_id == number)


def _front_batch(open_calls: list[Operation]) -> Iterator[Front]:
    """Yield the oldest open call, and with a send or recv the others of its batch: they stand or fall together."""
    if not open_calls:
        return
    first = open_calls[0]
    if first.kind == "collective":
        yield Front(first.group, "collective", first.collective_seq_id, first)
        return
    for call in open_calls:
        in_batch = call.kind == "p2p" and call.group == first.group and call.p2p_seq_id == first.p2p_seq_id
        if in_batch and (call is first or call.source is not None or call.destination is not None):
            yield Front(call.group, "p2p", call.p2p_seq_id, call)


def _is_plausible(dump_time_ns: int | None, newest_ns: int | None) -> bool:
    """Tell whether an mtime can be the dump's time: at most 1 s before the newest time in it, at most a day after."""
    if dump_time_ns is None or newest_ns is None:
        return False
    return newest_ns - _SECOND_NS <= dump_time_ns <= newest_ns + _DAY_NS


def _is_young(call: Operation, dump_time_ns: int | None, rule: AgeRule) -> bool:
    if dump_time_ns is None or call.issued_ns is None or has_timed_out(call):
        return False
    limit = rule.min_open_age_ns
    if call.timeout_ms:
        limit = min(limit, call.timeout_ms * 1_000_000 // 2)
    return dump_time_ns - call.issued_ns < limit


def _may_record_starts(dump: RankDump) -> bool:
    """Tell whether a start that the dump does not show did not happen: no call completed unseen to start."""
    if dump.operations.extremes.record_starts or any(counter.last_started is not None for counter in dump.progress):
        return True
    return dump.has_counters and all(counter.last_completed is None for counter in dump.progress)
