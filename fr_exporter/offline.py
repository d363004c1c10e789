"""Analyse dump files that are there already, without a daemon."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fr_exporter.config import DEFAULT_PATTERN, load
from fr_exporter.diagnosis import Diagnosis
from fr_exporter.dumpset import DumpSetSettings, Outcome, final_set
from fr_exporter.errors import UsageError
from fr_exporter.model import DumpFile, RankDump, Scope, UnreadableFile
from fr_exporter.pipeline import Pipeline, collector_paused, find_dumps

PARALLEL_FROM_BYTES = 16_000_000


def analyze_path(
    path: str,
    *,
    pattern: str = DEFAULT_PATTERN,
    scope: Scope = "job",
    world_size: int | None = None,
    generated_at_ns: int | None = None,
    jobs: int | None = 1,
) -> Diagnosis:
    """Analyse the dump files that `path` stands for (see `find_dumps`), or the records of the job at a URL, as final.

    `generated_at_ns` defaults to now. Limits and times are the configuration's defaults. Large sets are read in `jobs`
    processes; None takes the cores there are, and suits a program without threads. Raises UsageError where there is
    nothing to read.
    """
    config = load("", env={}, home="")
    make_pipeline = partial(
        Pipeline,
        max_dump_bytes=config.limits.max_dump_bytes,
        max_ranks=config.limits.max_ranks,
        min_open_age_ns=int(config.analysis.min_open_age_s * 1e9),
    )
    pipeline = make_pipeline()
    is_url = "://" in path
    settings = DumpSetSettings(
        training_job="default",
        source=path,
        scope=scope,
        world_size=world_size,
        window_s=config.dump_set.window_s,
        grace_s=config.dump_set.grace_s,
        by_node=is_url,
    )
    with collector_paused():
        if is_url:
            read = _read_records(path, pipeline, config.limits.max_dump_bytes)
        else:
            read = _read_dumps(path, pattern, make_pipeline, jobs)
        if not any(isinstance(outcome, RankDump) for _, outcome in read.outcomes):
            raise UsageError(f"{path}: no dump can be read; {read.first_refusal()}")
        dump_set = final_set(read.outcomes, settings)
        dump_set = replace(
            dump_set,
            warnings=(*read.warnings, *dump_set.warnings),
            unreadable=(*dump_set.unreadable, *read.refused),
        )
        return pipeline.analyse(dump_set, time.time_ns() if generated_at_ns is None else generated_at_ns)


@dataclass(frozen=True, slots=True)
class _Read:
    """What was read: files with what they gave, objects that gave nothing, and what to say about it."""

    outcomes: Sequence[tuple[DumpFile, Outcome]]
    refused: tuple[UnreadableFile, ...] = ()
    warnings: tuple[str, ...] = ()

    def first_refusal(self) -> str:
        """Return one file or object that gave no dump, and why."""
        all_refused = (*(outcome for _, outcome in self.outcomes if isinstance(outcome, UnreadableFile)), *self.refused)
        return "; ".join(f"{os.path.basename(each.file)}: {each.error}" for each in all_refused[:1])


def _read_dumps(path: str, pattern: str, make_pipeline: Callable[[], Pipeline], jobs: int | None) -> _Read:
    files, warnings = find_dumps(path, pattern)
    jobs = jobs or _default_jobs(files)
    if jobs == 1:
        return _Read(make_pipeline().read_all(files), warnings=warnings)
    # Imported here: most sets are small, and these imports take longer than reading them.
    from fr_exporter import parallel  # noqa: PLC0415

    return _Read(parallel.read_all(make_pipeline, files, jobs), warnings=warnings)


def _read_records(url: str, pipeline: Pipeline, max_object_bytes: int) -> _Read:
    # As above: the drivers of stores take longer still.
    from fr_exporter.fleet.snapshot import fetch_job  # noqa: PLC0415

    outcomes: list[tuple[DumpFile, Outcome]] = []
    refused: list[UnreadableFile] = []
    for fetched in fetch_job(url, max_object_bytes):
        records = fetched if isinstance(fetched, UnreadableFile) else pipeline.read_records(fetched)
        if isinstance(records, UnreadableFile):
            refused.append(records)
        else:
            outcomes += [(record.file, record.outcome) for record in records]
    return _Read(outcomes, tuple(refused))


def _default_jobs(files: Sequence[DumpFile]) -> int:
    """Return one process for each core, or one where starting several costs more than they save."""
    if sum(file.size for file in files) < PARALLEL_FROM_BYTES:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
