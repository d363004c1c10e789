"""Dumps of a small job, as values: what the dump-set and incident tests start from."""

from __future__ import annotations

from collections.abc import Sequence

from fr_exporter.dumpset import DumpSetSettings
from fr_exporter.model import (
    Calls,
    DumpFile,
    Frame,
    GroupProgress,
    Operation,
    ProcessGroup,
    RankDump,
    Scope,
    UnreadableFile,
)

SECOND = 1_000_000_000
# The moment at which the job of these tests began, in seconds since the epoch.
BEGIN = 1_758_610_000
MINUTE = 60
FRAME = Frame(name="train_step", filename="train.py", line=7)


def settings(*, scope: Scope = "job", world_size: int | None = None) -> DumpSetSettings:
    """Return the default settings: a window of 2 min, a grace of 60 s."""
    return DumpSetSettings(
        training_job="llm", source="/dumps", scope=scope, world_size=world_size, window_s=120.0, grace_s=60.0
    )


def group(name: str, ranks: Sequence[int]) -> ProcessGroup:
    """Return a process group."""
    return ProcessGroup.of(name, f"group {name}", tuple(ranks))


def file(rank: int, *, mtime_s: float = 0.0, path: str | None = None, node: str | None = None) -> DumpFile:
    """Return a rank's file, `mtime_s` seconds after the job began."""
    mtime_ns = BEGIN * SECOND + int(mtime_s * SECOND)
    return DumpFile(path=path or f"/dumps/_dump_{rank}", rank=rank, node=node, mtime_ns=mtime_ns, size=100)


def unreadable(rank: int, path: str | None = None) -> UnreadableFile:
    """Return what reading a half-written file of a rank gives."""
    return UnreadableFile(file=path or f"/dumps/_dump_{rank}", rank=rank, error="ends too early", result="partial")


def dump(
    rank: int,
    *,
    issued_s: Sequence[float | None] = (1.0,),
    first_record: int = 0,
    groups: Sequence[ProcessGroup] | None = None,
    world: Sequence[int] = (0, 1, 2, 3),
    enqueued: int | None = None,
    timeout_ms: int = 600_000,
    frames: bool = False,
) -> RankDump:
    """Return a rank's dump: one call for each of `issued_s`, in seconds after the job began, None for unknown."""
    of = tuple(groups) if groups is not None else (group("0", world),)
    return RankDump(
        rank=rank,
        node=None,
        source=f"/dumps/_dump_{rank}",
        version="2.10",
        comm_lib_version=None,
        groups=of,
        progress=tuple(GroupProgress(of[0], enqueued, None, None) for _ in of[:1]),
        operations=Calls.of(
            [_call(first_record + index, of[0], time, timeout_ms, frames) for index, time in enumerate(issued_s)]
        ),
        health={},
        dump_time_ns=None,
    )


def _call(record_id: int, of: ProcessGroup, issued_s: float | None, timeout_ms: int, frames: bool) -> Operation:
    return Operation(
        record_id=record_id,
        group=of,
        kind="collective",
        collective_seq_id=record_id + 1,
        p2p_seq_id=0,
        operation="nccl:all_reduce",
        source=None,
        destination=None,
        input_sizes=((8,),),
        output_sizes=((8,),),
        input_dtypes=("Float",),
        output_dtypes=("Float",),
        state="scheduled",
        retired=False,
        issued_ns=None if issued_s is None else BEGIN * SECOND + int(issued_s * SECOND),
        started_ns=None,
        completed_ns=None,
        timeout_ms=timeout_ms,
        frames=(FRAME,) if frames else (),
    )
