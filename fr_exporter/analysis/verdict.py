"""Put what was found into a `Diagnosis`: the verdict, the words, and the state of every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fr_exporter.analysis.progress import Front, RankState
from fr_exporter.analysis.scope import Attendance, node_local_warning
from fr_exporter.analysis.situation import Accusation, Culprit, Situation
from fr_exporter.analysis.summary import summarize
from fr_exporter.analysis.waitgraph import CallId
from fr_exporter.diagnosis import (
    AttributionState,
    Call,
    Cause,
    Diagnosis,
    HungGroup,
    Mismatch,
    RankProgress,
    RankReport,
    Suspect,
    Verdict,
)
from fr_exporter.model import DumpSet, Operation, Standing

# Causes that a restart would meet again, or that leave nobody to isolate.
STOP_CAUSES = frozenset({Cause.COLLECTIVE_MISMATCH, Cause.ORDER_DEADLOCK, Cause.P2P_UNMATCHED, Cause.DESYNC})

_CONFIDENCE = {"high": 0, "medium": 1, "low": 2}


@dataclass(frozen=True, slots=True)
class Conclusion:
    """All that the steps before found."""

    dump_set: DumpSet
    attended: Attendance
    situation: Situation
    culprits: tuple[Culprit, ...]
    hung: tuple[HungGroup, ...]
    awaited: frozenset[int]


def state(found: Conclusion, generated_at_ns: int) -> Diagnosis:
    """Return the diagnosis."""
    dump_set, attended = found.dump_set, found.attended
    laggards = _laggards(found)
    verdict = _verdict(found, laggards)
    is_hang = verdict == "hang"
    suspects = _suspects(found)
    times = [dump.dump_time_ns for dump in dump_set.dumps.values() if dump.dump_time_ns is not None]
    return Diagnosis(
        training_job=dump_set.training_job,
        source=dump_set.source,
        scope=dump_set.scope,
        verdict=verdict,
        partial=dump_set.partial,
        summary=summarize(verdict, suspects, found.hung, found.situation, attended, found.awaited, laggards),
        cause=found.hung[0].cause if is_hang and found.hung else None,
        attribution_state=_attribution_state(suspects),
        hung_process_groups=found.hung,
        suspects=suspects,
        mismatches=tuple(_mismatches(found.situation)) if is_hang else (),
        world_size=attended.world_size,
        expected_ranks=attended.expected,
        dumped_ranks=attended.dumped,
        missing_ranks=attended.missing,
        pending_ranks=attended.pending,
        stale_ranks=attended.stale,
        remote_ranks=attended.remote,
        unreadable_files=dump_set.unreadable,
        warnings=tuple(_warnings(found)),
        ranks=tuple(_rank_reports(found.situation.states)),
        dump_versions=tuple(sorted({dump.version for dump in dump_set.dumps.values()}, key=_version_number)),
        comm_lib_versions=tuple(sorted({dump.comm_lib_version or "" for dump in dump_set.dumps.values()} - {""})),
        generated_at_ns=generated_at_ns,
        first_dump_time_ns=min(times, default=None),
        last_dump_time_ns=max(times, default=None),
    )


def _verdict(found: Conclusion, laggards: Sequence[int]) -> Verdict:
    if found.culprits:
        return "hang"
    states = found.situation.states.values()
    if laggards or not states or any(rank.fronts or rank.unmapped is not None for rank in states):
        return "inconclusive"
    return "healthy"


def _laggards(found: Conclusion) -> tuple[int, ...]:
    """Return who is behind in a group where no dump holds a call and the counters differ, else nobody."""
    states = found.situation.states
    if any(rank.dump.operations or rank.fronts for rank in states.values()):
        return ()
    enqueued: dict[str, dict[int, int]] = {}
    for rank, rank_state in states.items():
        for key, standing in rank_state.standings.items():
            enqueued.setdefault(key, {})[rank] = standing.last_enqueued
    behind = {rank for counts in enqueued.values() for rank, count in counts.items() if count < max(counts.values())}
    return tuple(sorted(behind))


def _attribution_state(suspects: Iterable[Suspect]) -> AttributionState:
    if any(suspect.cause in STOP_CAUSES for suspect in suspects):
        return AttributionState.STOP
    return AttributionState.CONTINUE


def _suspects(found: Conclusion) -> tuple[Suspect, ...]:
    """Return one suspect a rank, sorted by rank: where several culprits name it, the surer one."""
    best: dict[int, Suspect] = {}
    for culprit in found.culprits:
        waiting = _waiting_ranks(culprit, found.situation)
        for accusation in culprit.suspects:
            known = best.get(accusation.rank)
            if known is None or _CONFIDENCE[accusation.confidence] < _CONFIDENCE[known.confidence]:
                best[accusation.rank] = _suspect(accusation, culprit.cause, waiting[accusation.rank], found.situation)
    return tuple(best[rank] for rank in sorted(best))


def _suspect(accusation: Accusation, cause: Cause, waiting: tuple[int, ...], situation: Situation) -> Suspect:
    rank_state = situation.states.get(accusation.rank)
    health = {} if rank_state is None else rank_state.dump.health
    return Suspect(
        rank=accusation.rank,
        node=None if rank_state is None else rank_state.dump.node,
        cause=cause,
        confidence=accusation.confidence,
        evidence=accusation.evidence + _health_words(health),
        waiting_ranks=waiting,
        last_call=None if rank_state is None else _last_call(rank_state),
        health=health,
    )


def _waiting_ranks(culprit: Culprit, situation: Situation) -> dict[int, tuple[int, ...]]:
    """Return who waits on each suspect. Those of one call have the same waiters: these are worked out once."""
    suspects = culprit.ranks
    by_calls: dict[tuple[CallId, ...], tuple[int, ...]] = {}
    waiting: dict[int, tuple[int, ...]] = {}
    for rank in suspects:
        calls = {call.id: call for call in (*situation.lacking.get(rank, ()), *culprit.calls)}
        key = tuple(calls)
        if key not in by_calls:
            waiters = {waiter for call in calls.values() for waiter in call.waiters}
            by_calls[key] = tuple(sorted(waiters - suspects))
        waiting[rank] = by_calls[key]
    return waiting


def _health_words(health: Mapping[str, str]) -> str:
    failed = [f"{device} {status}" for device, status in sorted(health.items()) if status.lower() != "healthy"]
    return f"; health check: {', '.join(failed)}" if failed else ""


def _last_call(rank_state: RankState) -> Call | None:
    """Return where the rank's code stands: the call it is stuck in, else the last it issued."""
    if rank_state.front is not None:
        return _front_call(rank_state.front)
    calls = rank_state.dump.operations
    return _call(calls[-1]) if calls else None


def _front_call(front: Front) -> Call:
    if front.operation is not None:
        return _call(front.operation)
    return Call(None, front.group, front.kind, front.seq_id, None, None, None)


def _call(call: Operation) -> Call:
    return Call(
        operation=call.operation,
        group=call.group,
        kind=call.kind,
        collective_seq_id=call.collective_seq_id,
        p2p_seq_id=call.p2p_seq_id,
        state=call.state,
        issued_ns=call.issued_ns,
        frames=call.frames,
    )


def _mismatches(situation: Situation) -> Iterator[Mismatch]:
    for call in situation.graph.calls.values():
        if call.id.kind == "collective":
            yield from situation.mismatches[call.group.key, call.id.seq_id]


def _rank_reports(states: Mapping[int, RankState]) -> Iterator[RankReport]:
    for rank, rank_state in states.items():
        yield RankReport(
            rank=rank,
            node=rank_state.dump.node,
            dump_time_ns=rank_state.dump.dump_time_ns,
            front=None if rank_state.front is None else _front_call(rank_state.front),
            progress=tuple(map(_progress, rank_state.standings.values())),
            health=rank_state.dump.health,
        )


def _progress(standing: Standing) -> RankProgress:
    """Return the counters as written where there are any; what the entries show where there are none."""
    counters = standing.counters
    if counters is not None:
        return RankProgress(
            group=standing.group,
            kind="p2p" if standing.mixed else "collective",
            last_enqueued=counters.last_enqueued,
            last_started=counters.last_started,
            last_completed=counters.last_completed,
            open_operations=standing.open_operations,
        )
    return RankProgress(
        group=standing.group,
        kind="collective",
        last_enqueued=standing.last_enqueued or None,
        last_started=None,
        last_completed=standing.last_completed or None,
        open_operations=standing.open_operations,
    )


def _warnings(found: Conclusion) -> Iterator[str]:
    yield from found.dump_set.warnings
    yield from node_local_warning(found.dump_set, found.attended)
    states = found.situation.states
    for warning, ranks in _by_text(states).items():
        yield f"{warning} (rank {ranks[0]}{f' and {len(ranks) - 1} more' if len(ranks) > 1 else ''})"
    if any(rank.fronts and not rank.age_known for rank in states.values()):
        yield (
            "the files' times are not those of the dumps, so that the age of open calls is unknown: a job that was "
            "asked for dumps while running would look the same"
        )
    uncertain = [rank for rank, rank_state in states.items() if not rank_state.certain]
    if uncertain:
        yield (
            f"rank {uncertain[0]} has open calls of several groups that are older than its ring; which it issued "
            "first is unknown"
        )
    unmapped = [rank for rank, rank_state in states.items() if rank_state.unmapped is not None]
    if unmapped:
        yield f"rank {unmapped[0]} has open calls of groups whose members its dump does not list; they are left out"


def _by_text(states: Mapping[int, RankState]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, rank_state in states.items():
        for warning in rank_state.dump.warnings:
            ranks.setdefault(warning, []).append(rank)
    return ranks


def _version_number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
