"""Read the dumps of a large job in several processes.

Loading a pickle holds the interpreter lock, so that threads do not help. Only compact results come back: the recorded
calls as bytes, stack frames of those that may be shown, each distinct member list once a batch.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial

from fr_exporter.dumpset import Outcome
from fr_exporter.errors import FRExporterError
from fr_exporter.model import DumpFile
from fr_exporter.pipeline import Pipeline, collector_paused

# Small enough that reading what comes back overlaps with the work.
_BATCH = 64

Reading = list[tuple[DumpFile, Outcome]]


def read_all(make_pipeline: Callable[[], Pipeline], files: Sequence[DumpFile], jobs: int) -> Reading:
    """Read files in `jobs` processes, each with a pipeline of its own; the order is that of `files`.

    `make_pipeline` must be picklable. Raises FRExporterError where a process ends before its work does.
    """
    batches = [files[start : start + _BATCH] for start in range(0, len(files), _BATCH)]
    # A forked process starts at once; on other platforms forking is not safe.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    with ProcessPoolExecutor(min(jobs, len(batches)), mp_context=context, initializer=gc.disable) as processes:
        try:
            return [read for batch in processes.map(partial(_read_batch, make_pipeline), batches) for read in batch]
        except BrokenProcessPool:
            raise FRExporterError("a process that read dumps was killed; try again with --jobs 1") from None


def _read_batch(make_pipeline: Callable[[], Pipeline], files: Sequence[DumpFile]) -> Reading:
    with collector_paused():
        return make_pipeline().read_all(files)
