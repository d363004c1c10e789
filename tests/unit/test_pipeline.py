"""From files on disk to outcomes and verdicts: what is no dump is named, and hides nothing else."""

from __future__ import annotations

import gc
import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import pytest

from fr_exporter.dumpset import Outcome
from fr_exporter.errors import UsageError
from fr_exporter.filenames import Matcher
from fr_exporter.model import DumpFile, RankDump, UnreadableFile
from fr_exporter.offline import analyze_path
from fr_exporter.parsing import DumpReader
from fr_exporter.pipeline import Pipeline, find_dumps, list_dumps
from tests.builders import Job

EVERY_DUMP = Matcher.from_pattern("_dump_*")


@dataclass
class Observer:
    """Keeps what the pipeline tells."""

    stages: list[tuple[str, bool]] = field(default_factory=list)
    results: list[tuple[str, int]] = field(default_factory=list)

    def observe_stage(self, stage: str, seconds: float, failed: bool) -> None:
        """Keep the stage, and whether it failed."""
        assert seconds >= 0
        self.stages.append((stage, failed))

    def file_read(self, result: str, size: int) -> None:
        """Keep the result and the size."""
        self.results.append((result, size))


def pipeline(observer: Observer | None = None, *, max_dump_bytes: int = 2**20) -> Pipeline:
    """Return a pipeline with usual settings."""
    return Pipeline(max_dump_bytes=max_dump_bytes, max_ranks=1024, min_open_age_ns=15_000_000_000, telemetry=observer)


def stalled_job(world_size: int = 4, *, guilty: int = 2) -> Job:
    """Return a job in whose second call `guilty` never arrived."""
    job = Job(world_size)
    job.collective(job.world)
    job.collective(job.world, by=job.world.without(guilty))
    return job


def read(directory: Path, observer: Observer | None = None) -> dict[int, Outcome]:
    """Read every `_dump_*` of a directory."""
    files = list_dumps(str(directory), EVERY_DUMP)
    return {file.rank: outcome for file, outcome in pipeline(observer).read_all(files)}


def error_of(outcome: Outcome) -> UnreadableFile:
    """Return the outcome of a file that gave no dump; its error is one line."""
    assert isinstance(outcome, UnreadableFile)
    assert outcome.error
    assert "\n" not in outcome.error
    return outcome


def test_a_good_file_becomes_the_dump_it_holds(tmp_path: Path) -> None:
    """The dump has the rank of the name and the mtime of the file, and every stage is timed."""
    stalled_job().write(tmp_path)
    os.utime(tmp_path / "_dump_3", ns=(7, 1_790_000_000_123_456_789))
    observer = Observer()

    dump = read(tmp_path, observer)[3]

    assert isinstance(dump, RankDump)
    assert (dump.rank, dump.dump_time_ns, dump.source) == (3, 1_790_000_000_123_456_789, str(tmp_path / "_dump_3"))
    assert sorted(observer.stages) == [("parse", False)] * 4 + [("read", False)] * 4
    sizes = [(tmp_path / f"_dump_{rank}").stat().st_size for rank in range(4)]
    assert sorted(observer.results) == sorted(("parsed", size) for size in sizes)


def test_the_node_comes_from_rank_and_file_name(tmp_path: Path) -> None:
    """`node_of` is asked with the rank and the host of the file's name, and its answer stands in the dump."""
    stalled_job().write(tmp_path, name="_dump_hostA_{rank}")
    reader = Pipeline(
        max_dump_bytes=2**20, max_ranks=8, min_open_age_ns=0, node_of=lambda rank, host: f"{host}/{rank // 2}"
    )

    outcomes = reader.read_all(list_dumps(str(tmp_path), EVERY_DUMP))

    assert {outcome.node for _, outcome in outcomes if isinstance(outcome, RankDump)} == {"hostA/0", "hostA/1"}


class RunsCode:
    """A pickle of this asks for `os.system`."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch must_not_be_there",)


def test_what_is_no_dump_is_named_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of bad file is counted under its result and named; the one good file among them is read."""
    monkeypatch.chdir(tmp_path)
    whole = pickle.dumps(stalled_job().dumps()[0])
    contents = {
        0: whole,
        1: b"",
        2: whole[: len(whole) // 2],
        3: pickle.dumps(RunsCode()),
        4: whole + b" " * 2**20,
        5: b"neither",
    }
    for rank, content in contents.items():
        (tmp_path / f"_dump_{rank}").write_bytes(content)

    observer = Observer()
    outcomes = read(tmp_path, observer)

    assert isinstance(outcomes.pop(0), RankDump)
    errors = {rank: error_of(outcome) for rank, outcome in outcomes.items()}
    assert {rank: error.result for rank, error in errors.items()} == {
        1: "partial",
        2: "partial",
        3: "rejected",
        4: "rejected",
        5: "unreadable",
    }
    assert all(error.file == str(tmp_path / f"_dump_{rank}") and error.rank == rank for rank, error in errors.items())
    assert sorted(result for result, _ in observer.results) == [
        "parsed",
        "partial",
        "partial",
        "rejected",
        "rejected",
        "unreadable",
    ]
    assert not (tmp_path / "must_not_be_there").exists()


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    """A file that is gone by the time it is read gives one line with the system's reason."""
    stalled_job().write(tmp_path)
    files = list_dumps(str(tmp_path), EVERY_DUMP)
    (tmp_path / "_dump_1").unlink()
    observer = Observer()

    outcomes = {file.rank: outcome for file, outcome in pipeline(observer).read_all(files)}

    assert error_of(outcomes.pop(1)).error == "cannot be read: No such file or directory"
    assert all(isinstance(outcome, RankDump) for outcome in outcomes.values())
    assert observer.stages.count(("read", True)) == 1


@pytest.mark.parametrize(
    ("failure", "result"),
    [
        (MemoryError(), "rejected"),
        (RecursionError(), "rejected"),
        (OSError(5, "Input/output error"), "unreadable"),
        (OSError(116, "Stale file handle"), "unreadable"),
        (KeyError("a fault of the parser"), "unreadable"),
    ],
)
def test_whatever_reading_meets_the_other_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, result: str
) -> None:
    """A file that ends in any error is named under its result; the three others give their dumps."""
    stalled_job().write(tmp_path)
    original = DumpReader.read

    def fails_for_rank_2(self: DumpReader, file: BinaryIO, **facts: object) -> RankDump:
        if facts["rank"] == 2:
            raise failure
        return original(self, file, **facts)  # type: ignore[arg-type]

    monkeypatch.setattr(DumpReader, "read", fails_for_rank_2)

    outcomes = read(tmp_path)

    assert error_of(outcomes.pop(2)).result == result
    assert all(isinstance(outcome, RankDump) for outcome in outcomes.values())


def test_a_file_written_to_while_it_is_read_is_partial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dump whose file changed under the reader is not trusted, even where it parsed."""
    stalled_job().write(tmp_path)
    original = DumpReader.read

    def reads_while_written(self: DumpReader, file: BinaryIO, **facts: object) -> RankDump:
        with (tmp_path / "_dump_0").open("ab") as writer:
            writer.write(b"more")
        return original(self, file, **facts)  # type: ignore[arg-type]

    monkeypatch.setattr(DumpReader, "read", reads_while_written)

    assert error_of(read(tmp_path)[0]).result == "partial"


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A FIFO, a directory or a dangling link named like a dump is passed over, and a FIFO blocks nobody."""
    os.mkfifo(tmp_path / "_dump_0")
    (tmp_path / "_dump_1").mkdir()
    (tmp_path / "_dump_2").symlink_to("nowhere")
    (tmp_path / "real").write_bytes(b"")
    (tmp_path / "_dump_3").symlink_to("real")

    assert [file.rank for file in list_dumps(str(tmp_path), EVERY_DUMP)] == [3]
    fifo = DumpFile(path=str(tmp_path / "_dump_0"), rank=0, node=None, mtime_ns=0, size=0)
    assert error_of(pipeline().read(fifo)).error == "is not a regular file"


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_found(tmp_path: Path, enabled: bool) -> None:
    """Reading many files changes nothing about the collector, whichever way it was set."""
    stalled_job().write(tmp_path)
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        read(tmp_path)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_a_directory_is_analysed(tmp_path: Path) -> None:
    """The files of a directory give the verdict of the job that wrote them, at the time that was passed in."""
    stalled_job(guilty=2).write(tmp_path)

    diagnosis = analyze_path(str(tmp_path), generated_at_ns=42)

    assert (diagnosis.verdict, diagnosis.suspect_ranks, diagnosis.partial) == ("hang", [2], False)
    assert (diagnosis.generated_at_ns, diagnosis.source) == (42, str(tmp_path))


def test_well_known_names_are_tried_and_the_choice_is_said(tmp_path: Path) -> None:
    """Where nothing is named `_dump_*`, PyTorch's own names are read, and a warning says which."""
    stalled_job(guilty=1).write(tmp_path, name="nccl_trace_rank_{rank}")

    diagnosis = analyze_path(str(tmp_path))

    assert diagnosis.suspect_ranks == [1]
    assert "No file matches _dump_*: read the files named nccl_trace_rank_<rank> instead." in diagnosis.warnings


def test_the_pattern_chooses_among_files(tmp_path: Path) -> None:
    """With a pattern only its files are read, whatever lies beside them."""
    stalled_job(guilty=1).write(tmp_path, name="first_{rank}")
    stalled_job(guilty=3).write(tmp_path, name="second_{rank}")

    assert analyze_path(str(tmp_path), pattern="second_*").suspect_ranks == [3]


def test_a_path_prefix_is_analysed(tmp_path: Path) -> None:
    """A path that does not exist but begins the names of files stands for those files."""
    stalled_job(guilty=0).write(tmp_path, name="trace_{rank}")
    stalled_job(guilty=3).write(tmp_path, name="other_{rank}")

    assert analyze_path(str(tmp_path / "trace_")).suspect_ranks == [0]


def test_one_file_is_analysed(tmp_path: Path) -> None:
    """One file is a set of one rank, its own; without a rank in the name it is rank 0, with a warning."""
    job = stalled_job()
    job.write(tmp_path)
    (tmp_path / "trace.pickle").write_bytes((tmp_path / "_dump_0").read_bytes())

    assert analyze_path(str(tmp_path / "_dump_3")).dumped_ranks == (3,)
    unnamed = analyze_path(str(tmp_path / "trace.pickle"))
    assert unnamed.dumped_ranks == (0,)
    assert "The file's name holds no rank: taken for rank 0." in unnamed.warnings


def test_nothing_to_read_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    """A path without dumps, and a directory whose every dump is refused, are usage errors of one line."""
    (tmp_path / "notes.txt").write_text("no dump")
    os.mkfifo(tmp_path / "pipe_0")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "_dump_0").write_bytes(b"neither")
    expected = {
        tmp_path: "--pattern",
        tmp_path / "absent": "no such file or directory",
        tmp_path / "absent" / "trace_": "No such file or directory",
        tmp_path / "pipe_0": "neither a directory nor a regular file",
        tmp_path / "bad": "_dump_0",
    }
    for path, part in expected.items():
        with pytest.raises(UsageError) as raised:
            analyze_path(str(path))
        message = str(raised.value)
        assert message.startswith(str(path))
        assert part in message
        assert "\n" not in message


def test_links_are_followed_to_the_directory(tmp_path: Path) -> None:
    """A directory behind a symbolic link is read like any other."""
    (tmp_path / "real").mkdir()
    stalled_job().write(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")

    files, warnings = find_dumps(str(tmp_path / "link"))

    assert ([file.rank for file in sorted(files, key=lambda file: file.rank)], warnings) == ([0, 1, 2, 3], ())
