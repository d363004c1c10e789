"""Analyse dump files that are there already, without a daemon."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fr_exporter.config import DEFAULT_PATTERN, load
from fr_exporter.diagnosis import Diagnosis
from fr_exporter.dumpset import DumpSetSettings, final_set
from fr_exporter.errors import UsageError
from fr_exporter.model import DumpFile, Scope, UnreadableFile
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
    """Analyse the dump files that `path` stands for (see `find_dumps`), taken as final.

    `generated_at_ns` defaults to now. Limits and times are the configuration's defaults. Large sets are read in `jobs`
    processes; None takes the cores there are, and suits a program without threads. Raises UsageError where there is
    nothing to read.
    """
    config = load("", env={}, home="")
    files, warnings = find_dumps(path, pattern)
    make_pipeline = partial(
        Pipeline,
        max_dump_bytes=config.limits.max_dump_bytes,
        max_ranks=config.limits.max_ranks,
        min_open_age_ns=int(config.analysis.min_open_age_s * 1e9),
    )
    pipeline = make_pipeline()
    settings = DumpSetSettings(
        training_job="default",
        source=path,
        scope=scope,
        world_size=world_size,
        window_s=config.dump_set.window_s,
        grace_s=config.dump_set.grace_s,
    )
    jobs = jobs or _default_jobs(files)
    with collector_paused():
        if jobs == 1:
            outcomes = pipeline.read_all(files)
        else:
            # Imported here: most sets are small, and these imports take longer than reading them.
            from fr_exporter import parallel  # noqa: PLC0415

            outcomes = parallel.read_all(make_pipeline, files, jobs)
        refused = [outcome for _, outcome in outcomes if isinstance(outcome, UnreadableFile)]
        if len(refused) == len(outcomes):
            raise UsageError(f"{path}: no dump can be read; {os.path.basename(refused[0].file)}: {refused[0].error}")
        dump_set = final_set(outcomes, settings)
        dump_set = replace(dump_set, warnings=(*warnings, *dump_set.warnings))
        return pipeline.analyse(dump_set, time.time_ns() if generated_at_ns is None else generated_at_ns)


def _default_jobs(files: Sequence[DumpFile]) -> int:
    """Return one process for each core, or one where starting several costs more than they save."""
    if sum(file.size for file in files) < PARALLEL_FROM_BYTES:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
