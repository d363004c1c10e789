"""Read the dumps of a large job in several processes.

Loading a pickle holds the interpreter lock, so that threads do not help. Only compact results come back: the recorded
calls as bytes, stack frames of those that may be shown, each distinct member list once a batch.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from fr_exporter.dumpset import Outcome
from fr_exporter.errors import FRExporterError
from fr_exporter.model import DumpFile
from fr_exporter.pipeline import Pipeline, collector_paused

# Small enough that taking in what comes back overlaps with the work.
_BATCH = 64

Reading = list[tuple[DumpFile, Outcome]]


@dataclass(frozen=True, slots=True)
class _Reader:
    """A process that reads a share of the files; `reading` is what it has sent so far."""

    process: BaseProcess
    results: Connection
    expected: int
    reading: Reading


def read_all(make_pipeline: Callable[[], Pipeline], files: Sequence[DumpFile], jobs: int) -> Reading:
    """Read files in `jobs` processes, each with a pipeline of its own; the order is that of `files`.

    `make_pipeline` must be picklable. Raises FRExporterError where a process ends before its work does.
    """
    jobs = min(jobs, len(files))
    readers: list[_Reader] = []
    try:
        for job in range(jobs):
            share = files[len(files) * job // jobs : len(files) * (job + 1) // jobs]
            readers.append(_start(make_pipeline, share))
        _receive(readers)
    finally:
        for reader in readers:
            reader.process.kill()
            reader.process.join()
            reader.results.close()
    return [read for reader in readers for read in reader.reading]


def _start(make_pipeline: Callable[[], Pipeline], share: Sequence[DumpFile]) -> _Reader:
    # A forked process starts at once; on other platforms forking is not safe.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    results, sender = context.Pipe(duplex=False)
    process = context.Process(target=_read_share, args=(make_pipeline, share, results, sender), daemon=True)
    process.start()
    # With the only sender in the process itself, its end is the end of the results.
    sender.close()
    return _Reader(process, results, len(share), [])


def _receive(readers: Sequence[_Reader]) -> None:
    while unfinished := [reader for reader in readers if len(reader.reading) < reader.expected]:
        ready = wait([reader.results for reader in unfinished])
        for reader in unfinished:
            if reader.results in ready:
                try:
                    reader.reading.extend(reader.results.recv())
                except (EOFError, OSError):  # between two messages, and within one
                    raise FRExporterError("a process that read dumps was killed; try again with --jobs 1") from None


def _read_share(
    make_pipeline: Callable[[], Pipeline], share: Sequence[DumpFile], results: Connection, sender: Connection
) -> None:
    # Ctrl-C reaches every process of a terminal: the one that was started by the user answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Else its own hold on the other end would keep this process alive without the one it works for.
    results.close()
    pipeline = make_pipeline()
    with collector_paused(), suppress(BrokenPipeError):
        for start in range(0, len(share), _BATCH):
            sender.send(pipeline.read_all(share[start : start + _BATCH]))
