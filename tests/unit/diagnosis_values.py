"""Builders of diagnoses and snapshots, for tests of what shows them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fr_exporter.diagnosis import (
    AttributionState,
    Call,
    Camp,
    Cause,
    Confidence,
    Diagnosis,
    HungGroup,
    Mismatch,
    RankProgress,
    RankReport,
    Suspect,
)
from fr_exporter.incidents import Incident
from fr_exporter.model import Kind, ProcessGroup, Scope, UnreadableFile
from fr_exporter.store import Snapshot, TargetState

SECOND = 1_000_000_000
SINCE = 1_758_610_505 * SECOND
WRITTEN = SINCE + 60 * SECOND
ANALYSED = WRITTEN + SECOND

EXPERT = ProcessGroup.of("74", "EXPERT_MODEL_PARALLEL_GROUP", (12, 13, 14, 15))
WORLD = ProcessGroup.of("0", "default_pg", tuple(range(16)))
PIPELINE = ProcessGroup.of("5", "PIPELINE_MODEL_PARALLEL_GROUP", (0, 4, 8, 12))


def diagnosis(**changes: Any) -> Diagnosis:
    """Return a healthy diagnosis of 16 ranks, changed as asked."""
    healthy = Diagnosis(
        training_job="llm-70b",
        source="/dumps",
        scope="job",
        verdict="healthy",
        partial=False,
        summary="No rank is stuck.",
        cause=None,
        attribution_state=AttributionState.CONTINUE,
        hung_process_groups=(),
        suspects=(),
        mismatches=(),
        world_size=16,
        expected_ranks=16,
        dumped_ranks=tuple(range(16)),
        missing_ranks=(),
        pending_ranks=(),
        stale_ranks=(),
        remote_ranks=(),
        unreadable_files=(),
        warnings=(),
        ranks=(),
        dump_versions=("2.9",),
        comm_lib_versions=("2.27.3",),
        generated_at_ns=ANALYSED,
        first_dump_time_ns=WRITTEN,
        last_dump_time_ns=WRITTEN,
    )
    return replace(healthy, **changes)


def suspect(
    rank: int, *, cause: Cause = Cause.DEVICE_STALL, confidence: Confidence = "high", **changes: Any
) -> Suspect:
    """Return a suspect, changed as asked."""
    usual = Suspect(
        rank=rank,
        node=f"node{rank // 8:02}",
        cause=cause,
        confidence=confidence,
        evidence="is stuck in a call that its peers completed",
        waiting_ranks=(),
        last_call=None,
        health={},
    )
    return replace(usual, **changes)


def hung(
    group: ProcessGroup = EXPERT, *, seq_id: int | None = 20537, kind: Kind = "collective", **changes: Any
) -> HungGroup:
    """Return a hung group in which 13 and 15 wait for 12 and 14, changed as asked."""
    usual = HungGroup(
        group=group,
        cause=Cause.DEVICE_STALL,
        operation="nccl:all_to_all" if kind == "collective" else "nccl:recv",
        kind=kind,
        collective_seq_id=seq_id if kind == "collective" else None,
        p2p_seq_id=seq_id if kind == "p2p" else None,
        input_sizes=((4027, 5120),),
        dtypes=("BFloat16",),
        waiting_ranks=(13, 15),
        waiting_on=(12, 14),
        since_ns=SINCE,
        frames=(),
    )
    return replace(usual, **changes)


def progress(
    group: ProcessGroup,
    enqueued: int | None,
    completed: int | None,
    *,
    kind: Kind = "collective",
    open_operations: int = 0,
) -> RankProgress:
    """Return one rank's progress in one group, as a dump without timing tells it."""
    return RankProgress(group, kind, enqueued, None, completed, open_operations)


def report(rank: int, *entries: RankProgress, stuck_in: ProcessGroup | None = None, **changes: Any) -> RankReport:
    """Return one rank's state; `stuck_in` is the group of its front."""
    front = None
    if stuck_in is not None:
        front = Call("nccl:all_to_all", stuck_in, "collective", 20537, None, "scheduled", SINCE)
    usual = RankReport(rank, f"node{rank // 8:02}", WRITTEN, front, entries, {})
    return replace(usual, **changes)


def device_stall() -> Diagnosis:
    """Return the diagnosis of 16 ranks of which 12 and 14 stopped on the device, as a real incident had it."""
    counters = {12: (20536, 20536), 13: (20537, 20536), 14: (20537, 20530), 15: (20537, 20536)}
    ranks = []
    for rank in range(16):
        entries = [progress(WORLD, 9, 9)]
        if rank in counters:
            enqueued, completed = counters[rank]
            entries.append(progress(EXPERT, enqueued, completed, open_operations=enqueued - completed))
        if rank in (0, 4, 8, 12):
            entries.append(progress(PIPELINE, 400 + rank, 399, kind="p2p", open_operations=2))
        ranks.append(report(rank, *entries, stuck_in=EXPERT if rank in (13, 15) else PIPELINE))
    return diagnosis(
        verdict="hang",
        summary="Ranks 12 and 14 stopped on their devices; ranks 13 and 15 wait for them in nccl:all_to_all 20537.",
        cause=Cause.DEVICE_STALL,
        hung_process_groups=(
            hung(),
            hung(PIPELINE, kind="p2p", seq_id=400, waiting_ranks=(0, 4, 8), waiting_on=(12,), since_ns=SINCE + SECOND),
        ),
        suspects=(
            suspect(
                12,
                evidence="is stuck in call 42806 of group 41, which rank 13 completed",
                waiting_ranks=(13, 15),
            ),
            suspect(
                14,
                evidence="is stuck in call 42806 of group 42, which rank 15 completed",
                waiting_ranks=(13, 15),
            ),
        ),
        ranks=tuple(
            replace(entry, health={"gpu": "Failed", "nic": "Healthy"} if entry.rank == 12 else {}) for entry in ranks
        ),
    )


def mismatch() -> Diagnosis:
    """Return a node's diagnosis of a collective that is not the same on all ranks, with every state of a rank in it."""
    group = ProcessGroup.of("0", "default_pg", tuple(range(8)))
    return diagnosis(
        training_job="vision",
        scope="node",
        verdict="hang",
        partial=True,
        summary="Rank 0 issued another all_reduce than the other ranks.",
        cause=Cause.COLLECTIVE_MISMATCH,
        attribution_state=AttributionState.STOP,
        hung_process_groups=(hung(group, seq_id=1, cause=Cause.COLLECTIVE_MISMATCH, operation="nccl:all_reduce"),),
        suspects=(suspect(0, cause=Cause.COLLECTIVE_MISMATCH, node=None),),
        mismatches=(
            Mismatch(group, 1, "size", (Camp("[104857600]", (1, 2)), Camp("[209715200]", (0,)))),
            Mismatch(group, 1, "dtype", (Camp("Float", (1, 2)), Camp("Half", (0,)))),
        ),
        world_size=16,
        expected_ranks=8,
        dumped_ranks=(0, 1, 2),
        missing_ranks=(3,),
        pending_ranks=(4,),
        stale_ranks=(5, 6),
        remote_ranks=tuple(range(8, 16)),
        unreadable_files=(UnreadableFile("/dumps/_dump_7", 7, "the file ends before the dump does", "partial"),),
        warnings=("pg_status of rank 2 could not be mapped to groups",),
        ranks=tuple(
            report(rank, RankProgress(group, "collective", 1, 1, None, 1), stuck_in=group, node=None, dump_time_ns=None)
            for rank in (0, 1, 2)
        ),
    )


def incident(found: Diagnosis, **changes: Any) -> Incident:
    """Return the open incident of a diagnosis, changed as asked."""
    return replace(
        Incident(
            id="20250923T065505Z-a1b2c3",
            training_job=found.training_job,
            scope=found.scope,
            opened_at_ns=ANALYSED,
            since_ns=SINCE,
            closed_at_ns=None,
            diagnosis=found,
        ),
        **changes,
    )


def target(
    found: Diagnosis | None = None, *, training_job: str = "idle", scope: Scope = "job", **changes: Any
) -> TargetState:
    """Return the state of a job with this diagnosis, its incident open where it is a final hang."""
    is_hang = found is not None and found.verdict == "hang"
    usual = TargetState(
        training_job=training_job if found is None else found.training_job,
        scope=scope if found is None else found.scope,
        path="/dumps",
        watch_up=True,
        backend="inotify",
        diagnosis=found,
        incident=incident(found) if found is not None and is_hang and not found.partial else None,
        hang=is_hang,
        last_analysis_ns=None if found is None else found.generated_at_ns,
    )
    return replace(usual, **changes)


def snapshot(targets: Iterable[TargetState], incidents: Iterable[Incident] = ()) -> Snapshot:
    """Return a snapshot of these targets."""
    return Snapshot(targets=tuple(targets), incidents=tuple(incidents))
