"""The directories that hold the dumps of one job: which files are there, and which of them changed."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Mapping

from fr_exporter.config import DEFAULT_PATTERN, Target
from fr_exporter.dumpset import Outcome
from fr_exporter.filenames import Matcher
from fr_exporter.model import DumpFile, UnreadableFile
from fr_exporter.pipeline import Pipeline, collector_paused, list_dumps, stat_dump
from fr_exporter.source import Sink, SourceStatus
from fr_exporter.watch import Watcher

log = logging.getLogger(__name__)


class Directories:
    """Reads a job's files as they change. Belongs to one thread.

    Files of a fresh directory that were written before `since_ns` count as found at start-up. The owner may put another
    `watcher` in place, which must watch all `paths`.
    """

    def __init__(self, training_job: str, target: Target, pipeline: Pipeline, watcher: Watcher, since_ns: int) -> None:
        self.name = ", ".join(target.prefixes) if target.path is None else target.path
        self.watcher = watcher
        self._training_job = training_job
        self._pipeline = pipeline
        self._since_ns = since_ns
        self._matchers = _matchers(target)
        # Of each file by directory: mtime and size when it was read, or why it could not be, which is tried again.
        self._files: dict[str, dict[str, tuple[int, int] | UnreadableFile]] = {path: {} for path in self._matchers}
        self._devices: dict[str, int] = {}
        self._changed: OrderedDict[str, None] = OrderedDict()

    @property
    def paths(self) -> tuple[str, ...]:
        """The directories that the job's files lie in."""
        return tuple(self._matchers)

    @property
    def pending(self) -> bool:
        """Whether there are changed files to read."""
        return bool(self._changed)

    @property
    def status(self) -> SourceStatus:
        """Up while one of the directories is watched; it tells something once one was listed."""
        up = [path for path in self._matchers if self.watcher.up(path)]
        backend = self.watcher.backend(next(iter(up or self._matchers)))
        return SourceStatus(up=bool(up), backend=backend, tells=bool(self._devices))

    def changed(self, path: str) -> None:
        """Note that something happened to a path in one of the directories."""
        self._changed[path] = None

    def compare(self, directories: Mapping[str, bool], sink: Sink) -> None:
        """Compare directories with what was read from them; True marks the fresh: new, back or replaced."""
        found = []
        for directory, is_fresh in directories.items():
            fresh = is_fresh or directory not in self._devices
            for file in self._list(directory, sink):
                if fresh and file.mtime_ns < self._since_ns:
                    found.append(file)
                else:
                    self._changed[file.path] = None
        if found:
            outcomes = self._pipeline.read_all(found)
            sink.found(outcomes)
            for file, outcome in outcomes:
                self._remember(file, outcome)

    def read(self, sink: Sink) -> None:
        """Read changed files until the analysis is due."""
        suspected: dict[str, bool] = {}
        with collector_paused():
            while self._changed and not sink.is_due():
                path, _ = self._changed.popitem(last=False)
                directory = os.path.dirname(path)
                file = stat_dump(path, self._matchers[directory])
                if file is not None:
                    self._read(file, self._files[directory].get(path), sink)
                elif path in self._files[directory]:
                    suspected[directory] = False
        # Only a listing proves a file gone: its whole directory may be out of reach.
        self.compare(suspected, sink)

    def _list(self, directory: str, sink: Sink) -> list[DumpFile]:
        """Return the files that were not read as they are now, and forget those that are gone."""
        try:
            files = list_dumps(directory, *self._matchers[directory])
        except OSError as error:
            self.watcher.lost(directory, error)
            return []
        known = self._files[directory]
        device = self.watcher.device(directory)
        # An unmounted directory shows an empty one on another device: then nothing is gone.
        if device is not None and (files or self._devices.get(directory, device) == device):
            self._devices[directory] = device
            for path in known.keys() - {file.path for file in files}:
                del known[path]
                sink.gone(path)
        return [file for file in files if known.get(file.path) != (file.mtime_ns, file.size)]

    def _read(self, file: DumpFile, before: tuple[int, int] | UnreadableFile | None, sink: Sink) -> None:
        if before == (file.mtime_ns, file.size):
            return
        outcome = self._pipeline.read(file)
        self._remember(file, outcome)
        if not isinstance(outcome, UnreadableFile) or outcome != before:
            sink.seen(file, outcome)

    def _remember(self, file: DumpFile, outcome: Outcome) -> None:
        known = self._files[os.path.dirname(file.path)]
        if not isinstance(outcome, UnreadableFile) or outcome.result == "partial":
            known[file.path] = (file.mtime_ns, file.size)
            return
        if known.get(file.path) != outcome:
            log.warning("training job %s: %s: %s", self._training_job, file.path, outcome.error)
        # What the system would not let us read can become readable without a change of the file.
        known[file.path] = outcome if outcome.result == "unreadable" else (file.mtime_ns, file.size)


def _matchers(target: Target) -> dict[str, tuple[Matcher, ...]]:
    """Return how dumps are named, by directory."""
    if target.path is not None:
        return {os.path.normpath(target.path): (Matcher.from_pattern(target.pattern or DEFAULT_PATTERN),)}
    matchers: dict[str, tuple[Matcher, ...]] = {}
    for prefix in target.prefixes:
        directory, beginning = os.path.split(prefix)
        directory = os.path.normpath(directory)
        matchers[directory] = (*matchers.get(directory, ()), Matcher.from_prefix(beginning))
    return matchers
