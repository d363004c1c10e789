"""The objects of one job in a store: which ranks' records they hold, and which of those are news."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from fr_exporter.dumpset import Outcome
from fr_exporter.model import DumpFile, UnreadableFile
from fr_exporter.pipeline import Fetched, Pipeline, Record, StageObserver, collector_paused
from fr_exporter.source import Sink, SourceStatus

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batch:
    """Objects that came, and those that could not be fetched; with `more` others of the same listing follow."""

    fetched: tuple[Fetched, ...]
    failed: tuple[UnreadableFile, ...]
    more: bool


class RecordObserver(StageObserver, Protocol):
    """What is told of records beside what is told of any dump."""

    def clock_offset(self, training_job: str, seconds: float) -> None:
        """Note how far ahead of the store's clock that of the node furthest off is."""


class Objects:
    """Reads the records that a poller brings. Belongs to the worker's thread.

    Records that the first listing shows, made before `since_ns`, count as found at start-up. Those made more than
    `ttl_ns` ago count so at any time: what waited on a node for its store to come back must not page.
    """

    def __init__(
        self,
        name: str,
        training_job: str,
        pipeline: Pipeline,
        telemetry: RecordObserver,
        *,
        since_ns: int,
        ttl_ns: int,
        wall_ns: Callable[[], int],
    ) -> None:
        self.name = name
        self._training_job = training_job
        self._pipeline = pipeline
        self._telemetry = telemetry
        self._since_ns = since_ns
        self._ttl_ns = ttl_ns
        self._wall_ns = wall_ns
        self._up = False
        self._complete = False
        self._to_do: deque[Callable[[Sink], None]] = deque()
        # What was found at start-up is told at once, when all of it is there.
        self._found: list[tuple[DumpFile, Outcome]] = []
        # By object: what was added to its times.
        self._offsets: dict[str, int] = {}
        # By object, then by the path of a record: the versions of the records there.
        self._versions: dict[str, dict[str, list[tuple[object, ...]]]] = {}
        self._refused: dict[str, UnreadableFile] = {}

    @property
    def pending(self) -> bool:
        """Whether something was brought that is not read."""
        return bool(self._to_do)

    @property
    def status(self) -> SourceStatus:
        """It tells something while it is up and was read once: records that cannot come may tell of a hang."""
        return SourceStatus(up=self._up, backend="polling", tells=self._up and self._complete)

    def listed(self, urls: frozenset[str], *, more: bool) -> None:
        """Take in a listing, the URLs of all objects that are there; with `more` some of them follow."""
        self._up = True
        self._to_do.append(partial(self._forget_others, urls))
        if not more:
            self._to_do.append(self._settle)

    def take(self, batch: Batch) -> None:
        """Take in objects of the last listing."""
        self._to_do.extend(partial(self._read, fetched) for fetched in batch.fetched)
        if batch.failed:
            self._to_do.append(partial(self._fail, batch.failed))
        if not batch.more:
            self._to_do.append(self._settle)

    def lost(self) -> None:
        """Take in that the store cannot be listed; nothing is gone for that."""
        self._up = False

    def read(self, sink: Sink) -> None:
        """Read what was brought, until the analysis is due."""
        with collector_paused():
            while self._to_do and not sink.is_due():
                self._to_do.popleft()(sink)

    def _forget_others(self, urls: frozenset[str], sink: Sink) -> None:
        for url in (self._versions.keys() | self._refused.keys()) - urls:
            self._offsets.pop(url, None)
            for path in self._versions.pop(url, ()):
                sink.gone(path)
            self._accept(url, sink)

    def _read(self, fetched: Fetched, sink: Sink) -> None:
        records = self._pipeline.read_records(fetched)
        if isinstance(records, UnreadableFile):
            self._refuse([records], sink)
            return
        self._accept(fetched.url, sink)
        by_path: dict[str, list[Record]] = {}
        for record in records:
            by_path.setdefault(record.file.path, []).append(record)
        before = self._versions.get(fetched.url, {})
        self._offsets[fetched.url] = max((record.clock_offset_ns for record in records), key=abs, default=0)
        versions = {path: [record.version for record in of_rank] for path, of_rank in by_path.items()}
        self._versions[fetched.url] = versions
        for path in before.keys() - versions.keys():
            sink.gone(path)
        # A publisher that starts anew sends what it sent before: that is no news.
        changed = [path for path, version in versions.items() if before.get(path) != version]
        self._tell([(record.file, record.outcome) for path in changed for record in by_path[path]], sink)

    def _tell(self, records: Sequence[tuple[DumpFile, Outcome]], sink: Sink) -> None:
        late_ns = self._wall_ns() - self._ttl_ns
        if not self._complete:
            late_ns = max(late_ns, self._since_ns)
        late = [(file, outcome) for file, outcome in records if file.mtime_ns < late_ns]
        for file, outcome in records:
            if file.mtime_ns >= late_ns:
                sink.seen(file, outcome)
        if not self._complete:
            self._found += late
        elif late:
            sink.found(late)

    def _settle(self, sink: Sink) -> None:
        """End a listing; the first one tells what was found at start-up."""
        self._complete = True
        furthest_ns = max(self._offsets.values(), key=abs, default=0)
        self._telemetry.clock_offset(self._training_job, -furthest_ns / 1e9)
        if self._found:
            sink.found(self._found)
            self._found = []

    def _fail(self, failed: Sequence[UnreadableFile], sink: Sink) -> None:
        for why in failed:
            self._telemetry.file_read(why.result, 0)
        self._refuse(failed, sink)

    def _refuse(self, refused: Sequence[UnreadableFile], sink: Sink) -> None:
        news = [why for why in refused if self._refused.get(why.file) != why]
        for why in news:
            self._refused[why.file] = why
            sink.refused(why.file, why)
        if news:
            others = f" (and {len(news) - 1} more objects)" if len(news) > 1 else ""
            log.warning("training job %s: %s: %s%s", self._training_job, news[0].file, news[0].error, others)

    def _accept(self, url: str, sink: Sink) -> None:
        if self._refused.pop(url, None) is not None:
            sink.refused(url, None)
