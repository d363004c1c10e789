"""Reading in several processes gives what reading in one gives, or says in one line that it could not."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from fr_exporter import parallel
from fr_exporter.dumpset import Outcome
from fr_exporter.errors import FRExporterError
from fr_exporter.filenames import Matcher
from fr_exporter.model import DumpFile, RankDump, UnreadableFile
from fr_exporter.offline import analyze_path
from fr_exporter.pipeline import Pipeline, list_dumps
from tests.builders import Job

# More than one process reads in one go.
WORLD_SIZE = 150

make_pipeline = partial(Pipeline, max_dump_bytes=2**20, max_ranks=1000, min_open_age_ns=0)


def write_stalled_job(directory: Path) -> list[DumpFile]:
    """Write the dumps of a job in whose last call rank 7 never arrived; rank 9's is half there."""
    job = Job(WORLD_SIZE)
    job.collective(job.world)
    job.collective(job.world, by=job.world.without(7))
    job.write(directory)
    half = directory / "_dump_9"
    half.write_bytes(half.read_bytes()[:100])
    return list_dumps(str(directory), Matcher.from_pattern("_dump_*"))


@pytest.mark.parametrize("jobs", [2, 5])
def test_the_verdict_does_not_depend_on_the_number_of_processes(tmp_path: Path, jobs: int) -> None:
    """Several processes give the whole diagnosis that one gives."""
    write_stalled_job(tmp_path)

    alone = analyze_path(str(tmp_path), generated_at_ns=42, jobs=1)
    together = analyze_path(str(tmp_path), generated_at_ns=42, jobs=jobs)

    assert together.to_dict() == alone.to_dict()
    assert (together.suspect_ranks, len(together.dumped_ranks)) == ([7], WORLD_SIZE - 1)


def test_what_was_read_comes_in_the_order_of_the_files(tmp_path: Path) -> None:
    """However the files are ordered and shared out, each stands beside what is in it."""
    files = sorted(write_stalled_job(tmp_path), key=lambda file: -file.rank)

    read = parallel.read_all(make_pipeline, files, jobs=3)

    assert [file for file, _ in parallel.read_all(make_pipeline, files[:2], jobs=5)] == files[:2]
    assert [file for file, _ in read] == files
    assert [outcome.rank for _, outcome in read] == [file.rank for file in files]
    assert [outcome.rank for _, outcome in read if isinstance(outcome, UnreadableFile)] == [9]
    assert sum(isinstance(outcome, RankDump) for _, outcome in read) == WORLD_SIZE - 1


class FatalPipeline(Pipeline):
    """A pipeline on which a file is fatal: it ends the process as the kernel does when memory runs out."""

    def read_all(self, files: Iterable[DumpFile]) -> list[tuple[DumpFile, Outcome]]:
        """Read the files, or die of the file of rank 140."""
        files = list(files)
        if any(file.rank == 140 for file in files):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read_all(files)


@pytest.mark.parametrize("jobs", [2, 5])
def test_a_process_that_is_killed_is_one_clear_error(tmp_path: Path, jobs: int) -> None:
    """The others are ended, and the error says what may help; half a set would give a wrong verdict."""
    files = write_stalled_job(tmp_path)
    fatal = partial(FatalPipeline, max_dump_bytes=2**20, max_ranks=1000, min_open_age_ns=0)

    with pytest.raises(FRExporterError, match=r"^a process that read dumps was killed; try again with --jobs 1$"):
        parallel.read_all(fatal, files, jobs)
    assert multiprocessing.active_children() == []


class OrphanedPipeline(Pipeline):
    """A pipeline that loses the process it works for, and then has more to say than a pipe holds."""

    def read_all(self, files: Iterable[DumpFile]) -> list[tuple[DumpFile, Outcome]]:
        """Kill the parent, and return a long answer."""
        os.kill(os.getppid(), signal.SIGKILL)
        return [(file, UnreadableFile(file.path, file.rank, "x" * 2**20, "unreadable")) for file in files]


def test_no_process_outlives_the_one_it_works_for(tmp_path: Path) -> None:
    """When `analyze` is killed its processes end by themselves: the last that holds a pipe open is gone."""
    files = write_stalled_job(tmp_path)
    orphaned = partial(OrphanedPipeline, max_dump_bytes=2**20, max_ranks=1000, min_open_age_ns=0)
    context = multiprocessing.get_context("fork")
    alive, held = context.Pipe(duplex=False)

    def work(_: Connection) -> None:
        parallel.read_all(orphaned, files, jobs=3)

    parent = context.Process(target=work, args=(held,))
    parent.start()
    held.close()
    parent.join(timeout=20)

    assert parent.exitcode == -signal.SIGKILL
    assert alive.poll(timeout=20)
    with pytest.raises(EOFError):
        alive.recv()
