"""From files to a diagnosis: find, read, parse, analyse. One bad file never hides the others."""

from __future__ import annotations

import gc
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import BinaryIO, Literal, Protocol, TypeVar

from fr_exporter.analysis import diagnose
from fr_exporter.config import DEFAULT_PATTERN
from fr_exporter.diagnosis import Diagnosis
from fr_exporter.dumpset import Outcome
from fr_exporter.errors import DumpError, MalformedDump, PartialDump, RejectedDump, UsageError
from fr_exporter.filenames import WELL_KNOWN_PREFIXES, Matcher
from fr_exporter.model import DumpFile, DumpSet, NodeRecords, RankDump, UnreadableFile
from fr_exporter.parsing import DumpReader

Stage = Literal["read", "parse", "analyse"]
T = TypeVar("T")

log = logging.getLogger(__name__)


class StageObserver(Protocol):
    """What the pipeline tells of its own work: seconds of each stage, and what became of each file."""

    def observe_stage(self, stage: Stage, seconds: float, failed: bool) -> None:
        """Count one pass through a stage."""

    def file_read(self, result: str, size: int) -> None:
        """Count one file; `result` is `parsed`, `partial`, `rejected` or `unreadable`, `size` is in bytes."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """An object of records: its address, whose its name says it is, and when it was written, by the store's clock."""

    url: str
    training_job: str
    attempt: int
    node: str
    data: bytes
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Record:
    """What one rank's record in an object says. `file` stands for the dump that it was made from.

    `version` is the same where the record is of the same dump as before. `clock_offset_ns` was added to its times.
    """

    file: DumpFile
    version: tuple[object, ...]
    outcome: Outcome
    clock_offset_ns: int


class Pipeline:
    """Reads the dump files of one target and analyses its dump sets. Member lists and frames are shared inside it."""

    def __init__(
        self,
        *,
        max_dump_bytes: int,
        max_ranks: int,
        min_open_age_ns: int,
        telemetry: StageObserver | None = None,
        node_of: Callable[[int, str | None], str | None] = lambda _, host: host,
    ) -> None:
        self._reader = DumpReader(max_dump_bytes, max_ranks)
        self._min_open_age_ns = min_open_age_ns
        self._telemetry = telemetry
        self._node_of = node_of

    def read(self, file: DumpFile) -> Outcome:
        """Return the dump in a file, or an UnreadableFile that says in one line why there is none."""
        outcome = self._attempt(file.path, file.rank, file.size, lambda: self._parse(file))
        if isinstance(outcome, RankDump):
            calls = len(outcome.operations)
            log.debug("%s: rank %d, version %s, %d calls", file.path, file.rank, outcome.version, calls)
        return outcome

    def read_all(self, files: Iterable[DumpFile]) -> list[tuple[DumpFile, Outcome]]:
        """Read many files, each as `read` does."""
        return [(file, self.read(file)) for file in files]

    def read_records(self, fetched: Fetched) -> list[Record] | UnreadableFile:
        """Return the records in an object, or an UnreadableFile that says in one line why there are none."""
        read = self._attempt(fetched.url, None, len(fetched.data), lambda: self._decode(fetched))
        return read if isinstance(read, UnreadableFile) else list(_records(read, fetched))

    def analyse(self, dump_set: DumpSet, generated_at_ns: int) -> Diagnosis:
        """Return the verdict over a dump set."""
        with collector_paused(), self._stage("analyse"):
            return diagnose(dump_set, generated_at_ns=generated_at_ns, min_open_age_ns=self._min_open_age_ns)

    def _parse(self, file: DumpFile) -> tuple[RankDump, int]:
        with self._stage("read"):
            stream = open_dump(file.path)
        with stream:
            before = os.fstat(stream.fileno())
            with self._stage("parse"):
                dump = self._reader.read(
                    stream,
                    size=before.st_size,
                    rank=file.rank,
                    node=self._node_of(file.rank, file.node),
                    source=file.path,
                    mtime_ns=before.st_mtime_ns,
                )
            after = os.fstat(stream.fileno())
        if (after.st_mtime_ns, after.st_size) != (before.st_mtime_ns, before.st_size):
            raise PartialDump("was written to while it was read")
        return dump, before.st_size

    def _decode(self, fetched: Fetched) -> tuple[NodeRecords, int]:
        with self._stage("parse"):
            records = self._reader.read_object(fetched.data, source=fetched.url, mtime_ns=fetched.mtime_ns)
        place = (records.training_job, records.attempt, records.node)
        if place != (fetched.training_job, fetched.attempt, fetched.node):
            raise RejectedDump(
                "refused: it holds the records of training job {!r}, attempt {}, node {!r}".format(*place)
            )
        return records, len(fetched.data)

    def _attempt(self, path: str, rank: int | None, size: int, read: Callable[[], tuple[T, int]]) -> T | UnreadableFile:
        """Return what reading gives, beside which it says how many bytes it read, or why it gives nothing."""
        try:
            outcome, size = read()
        except DumpError as error:
            refused = UnreadableFile(path, rank, str(error), error.result)
        except MemoryError:
            refused = UnreadableFile(path, rank, "needs more memory than limits.max_memory leaves", "rejected")
        except RecursionError:
            refused = UnreadableFile(path, rank, "is nested deeper than any flight-recorder dump", "rejected")
        except OSError as error:
            refused = UnreadableFile(path, rank, f"cannot be read: {error.strerror or error}", "unreadable")
        except Exception as error:  # a fault of the parser must not cost the verdict over the other files
            log.exception("%s: the parser failed; this is a bug in fr_exporter, please report it", path)
            why = f"the parser failed on it ({type(error).__name__}: {error})"
            refused = UnreadableFile(path, rank, why, "unreadable")
        else:
            self._count("parsed", size)
            return outcome
        self._count(refused.result, size)
        return refused

    def _count(self, result: str, size: int) -> None:
        if self._telemetry is not None:
            self._telemetry.file_read(result, size)

    @contextmanager
    def _stage(self, stage: Stage) -> Iterator[None]:
        started = time.perf_counter()
        failed = True
        try:
            yield
            failed = False
        finally:
            if self._telemetry is not None:
                self._telemetry.observe_stage(stage, time.perf_counter() - started, failed)


def _records(records: NodeRecords, fetched: Fetched) -> Iterator[Record]:
    offset_ns = records.clock_offset_ns
    for dump in records.dumps:
        written_ns = dump.dump_time_ns
        extremes = dump.operations.extremes
        version = (
            None if written_ns is None else written_ns - offset_ns,
            extremes.last_record_id,
            None if extremes.newest_time_ns is None else extremes.newest_time_ns - offset_ns,
            tuple((each.group.key, each.last_enqueued, each.last_completed) for each in dump.progress),
        )
        mtime_ns = fetched.mtime_ns if written_ns is None else written_ns
        file = DumpFile(dump.source, dump.rank, fetched.node, mtime_ns, len(fetched.data))
        yield Record(file, version, dump, offset_ns)
    for refused in records.unreadable:
        if refused.rank is not None:
            file = DumpFile(f"{fetched.url}#{refused.rank}", refused.rank, fetched.node, fetched.mtime_ns, 0)
            outcome = replace(refused, file=f"{fetched.node}:{refused.file}")
            yield Record(file, (refused.error,), outcome, offset_ns)


def open_dump(path: str) -> BinaryIO:
    """Open a regular file for reading and nothing else: a FIFO or device named like a dump must never block us.

    Raises MalformedDump for anything that is no regular file, OSError where it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise MalformedDump("is not a regular file")
    return open(descriptor, "rb")


def list_dumps(directory: str, *matchers: Matcher) -> list[DumpFile]:
    """Return the files of a directory whose name a matcher knows. Raises OSError for an unreadable directory."""
    with os.scandir(directory) as entries:
        files = [stat_dump(entry.path, matchers) for entry in entries]
    return [file for file in files if file is not None]


def stat_dump(path: str, matchers: Iterable[Matcher]) -> DumpFile | None:
    """Return the dump file at a path; None where its name matches nothing, or there is no regular file."""
    name = os.path.basename(path)
    match = next((match for matcher in matchers if (match := matcher.match(name)) is not None), None)
    if match is None:
        return None
    rank, node = match
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError:
        # An I/O error or a stale handle: let the read meet it again, so that the file is named with the reason.
        return DumpFile(path=path, rank=rank, node=node, mtime_ns=0, size=0)
    if not stat.S_ISREG(status.st_mode):
        return None
    return DumpFile(path=path, rank=rank, node=node, mtime_ns=status.st_mtime_ns, size=status.st_size)


def find_dumps(path: str, pattern: str = DEFAULT_PATTERN) -> tuple[list[DumpFile], tuple[str, ...]]:
    """Return the dump files a user's path stands for, and warnings about how they were chosen.

    `path` is a directory (then `pattern` selects in it, or the well-known prefixes where it finds nothing), one file,
    or a path prefix. Raises UsageError where there is none.
    """
    try:
        if os.path.isdir(path):
            return _find_in_directory(path, pattern)
        if os.path.exists(path):
            return _one_file(path)
        directory, prefix = os.path.split(path)
        files = list_dumps(directory or os.curdir, Matcher.from_prefix(prefix)) if prefix else []
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    if not files:
        raise UsageError(f"{path}: there is no such file or directory, and no dump file has a name that starts so")
    return files, ()


def _find_in_directory(path: str, pattern: str) -> tuple[list[DumpFile], tuple[str, ...]]:
    if files := list_dumps(path, Matcher.from_pattern(pattern)):
        return files, ()
    for prefix in WELL_KNOWN_PREFIXES:
        if files := list_dumps(path, Matcher.from_prefix(prefix)):
            return files, (f"No file matches {pattern}: read the files named {prefix}<rank> instead.",)
    known = ", ".join(f"{prefix}<rank>" for prefix in WELL_KNOWN_PREFIXES)
    raise UsageError(f"{path}: no file matches {pattern}, nor {known}; name the dump files with --pattern")


def _one_file(path: str) -> tuple[list[DumpFile], tuple[str, ...]]:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path}: is neither a directory nor a regular file")
    match = Matcher.from_pattern("*").match(os.path.basename(path))
    rank, node = (0, None) if match is None else match
    warnings = ("The file's name holds no rank: taken for rank 0.",) if match is None else ()
    return [DumpFile(path=path, rank=rank, node=node, mtime_ns=status.st_mtime_ns, size=status.st_size)], warnings


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector: dumps and verdicts hold no cycles, and a collection walks every dump read so far."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
