"""One training job at work: its present dump set, its verdict, its incident."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from fr_exporter.config import (
    AnalysisOptions,
    DumpSetOptions,
    IncidentOptions,
    Limits,
    Target,
    Topology,
)
from fr_exporter.diagnosis import Diagnosis
from fr_exporter.dumpset import DumpSetSettings, DumpSetTracker, Outcome
from fr_exporter.incidents import IncidentLog, IncidentUpdate
from fr_exporter.metrics.telemetry import Telemetry
from fr_exporter.model import DumpFile, DumpSet, RankDump, UnreadableFile
from fr_exporter.pipeline import Pipeline
from fr_exporter.source import Source
from fr_exporter.store import Store, TargetState
from fr_exporter.topology import locate_suspects

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobOptions:
    """All that a job's work depends on: a reload that leaves them equal leaves the job alone."""

    training_job: str
    target: Target
    dump_set: DumpSetOptions
    analysis: AnalysisOptions
    incidents: IncidentOptions
    limits: Limits
    topology: Topology
    hosts: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all jobs share: where results go, and the clocks, monotonic in seconds and UTC in nanoseconds.

    `publish` takes the present set of a job each time a dump has landed; None where nothing is published.
    """

    store: Store
    telemetry: Telemetry
    clock: Callable[[], float]
    wall_ns: Callable[[], int]
    publish: Callable[[DumpSet], None] | None = None


class Job:
    """Keeps a job's state in the store up to date with the dumps that its source reads. Belongs to one thread."""

    def __init__(self, options: JobOptions, source: Source, pipeline: Pipeline, shared: Surroundings) -> None:
        self.options = options
        self._shared = shared
        self._source = source
        self._pipeline = pipeline
        self._tracker = DumpSetTracker(
            DumpSetSettings(
                training_job=options.training_job,
                source=source.name,
                scope=options.target.scope,
                world_size=options.target.world_size,
                window_s=options.dump_set.window_s,
                grace_s=options.dump_set.grace_s,
                by_node=options.target.url is not None,
            )
        )
        self._incidents = IncidentLog(options.incidents.ttl_s)
        self._refused: dict[str, UnreadableFile] = {}
        self._is_news = False
        self._awaited_mtimes: list[int] = []
        self._pending_ranks: set[int] = set()
        self._analyse_at = math.inf
        self._expires_at = math.inf
        self._analysis_took_s = 0.0
        self._diagnosis: Diagnosis | None = None
        self._last_analysis_ns: int | None = None
        self._latest = IncidentUpdate(diagnosis=None, incident=None, hang=False, changed=(), counted=None)
        self._state: TargetState | None = None

    @property
    def deadline(self) -> float:
        """When `step` has something to do, if nothing changes before."""
        return -math.inf if self._source.pending else min(self._analyse_at, self._expires_at)

    def seen(self, file: DumpFile, outcome: Outcome) -> None:
        """Take in a file that is new or has changed."""
        self._tracker.seen(file, outcome, now=self._shared.clock())
        self._is_news = True
        self._soon()
        if isinstance(outcome, RankDump):
            self._awaited_mtimes.append(file.mtime_ns)
            if self._pending_ranks == {file.rank}:
                # The last one: there is nothing left to settle.
                self._analyse_at = -math.inf
            self._pending_ranks.discard(file.rank)

    def found(self, files: Iterable[tuple[DumpFile, Outcome]]) -> None:
        """Take in files that changed when their mtimes say."""
        self._tracker.found(files, now=self._shared.clock(), wall_ns=self._shared.wall_ns())
        self._is_news = True
        self._analyse_at = -math.inf

    def gone(self, path: str) -> None:
        """Take in that a file is no longer there."""
        self._tracker.gone(path)
        self._is_news = True
        self._soon()

    def refused(self, path: str, why: UnreadableFile | None) -> None:
        """Take in why what holds the files of many ranks cannot be read; what they said before stays in use."""
        if why is None:
            self._refused.pop(path, None)
        else:
            self._refused[path] = why
        self._soon()

    def is_due(self) -> bool:
        """Tell whether the analysis is due: the first verdict must not wait for the last of thousands of files."""
        return self._shared.clock() >= self._analyse_at

    def step(self) -> None:
        """Read what changed, analyse when it is time, and put the result in the store."""
        self._source.read(self)
        now = self._shared.clock()
        # At once: who reads what all nodes publish waits for files to settle, too.
        if self._is_news and self._shared.publish is not None:
            self._shared.publish(self._tracker.present(now))
        self._is_news = False
        awaited: list[int] = []
        if now >= self._analyse_at:
            awaited, self._awaited_mtimes = self._awaited_mtimes, []
            self._analyse(now)
        elif now >= self._expires_at:
            self._conclude(now)
        self._publish()
        for mtime_ns in awaited:
            self._shared.telemetry.detection_latency((self._shared.wall_ns() - mtime_ns) / 1e9)

    def finish(self) -> None:
        """Read and analyse all that changed, now."""
        while self._source.pending:
            self.step()
        self._analyse_at = -math.inf
        self.step()

    def close(self) -> None:
        """Close the incident of a job that is no longer watched, and drop its state."""
        self._diagnosis = None
        self._conclude(self._shared.clock())
        self._shared.store.forget(self.options.training_job)

    def _soon(self) -> None:
        """Analyse when settled, counted from the first change, so that changes cannot put it off for ever.

        Where the analysis takes longer than that, as of thousands of ranks, as much time is left for reading as for it.
        """
        wait_s = max(self.options.dump_set.settle_s, self._analysis_took_s)
        self._analyse_at = min(self._analyse_at, self._shared.clock() + wait_s)

    def _analyse(self, now: float) -> None:
        present = self._tracker.present(now)
        if self._refused:
            refused = (why for _, why in sorted(self._refused.items()))
            present = replace(present, unreadable=(*present.unreadable, *refused))
        deadline = self._tracker.deadline(now)
        self._analyse_at = math.inf if deadline is None else deadline
        self._last_analysis_ns = self._shared.wall_ns()
        has_files = present.dumps or present.unreadable
        self._diagnosis = self._pipeline.analyse(present, self._last_analysis_ns) if has_files else None
        if self._diagnosis is not None and self.options.hosts is not None:
            self._diagnosis = locate_suspects(self._diagnosis, self.options.hosts)
        self._analysis_took_s = self._shared.clock() - now
        self._pending_ranks = set(self._diagnosis.pending_ranks if self._diagnosis is not None else ())
        self._conclude(now)

    def _conclude(self, now: float) -> None:
        """Bring the incident up to date with the diagnosis and the time that has passed."""
        job, scope = self.options.training_job, self.options.target.scope
        quiet_s = self._tracker.quiet_s(now)
        ttl_s = self.options.incidents.ttl_s
        self._expires_at = now + ttl_s - quiet_s if quiet_s < ttl_s else math.inf
        self._latest = self._incidents.update(
            self._diagnosis,
            serial=self._tracker.serial,
            at_startup=self._tracker.at_startup,
            age_s=quiet_s,
            now_ns=self._shared.wall_ns(),
        )
        for incident in self._latest.changed:
            self._shared.store.record(incident)
            if incident.closed_at_ns is not None:
                log.info("training job %s: incident %s is over", job, incident.id)
        if self._latest.counted is not None:
            self._shared.telemetry.incident_opened(job, scope, self._latest.counted)

    def _publish(self) -> None:
        status = self._source.status
        state = TargetState(
            training_job=self.options.training_job,
            scope=self.options.target.scope,
            path=self._source.name,
            watch_up=status.up,
            backend=status.backend,
            diagnosis=self._latest.diagnosis,
            hang=self._latest.hang if self._latest.hang or status.tells else None,
            incident=self._latest.incident,
            last_analysis_ns=self._last_analysis_ns,
        )
        if state != self._state:
            self._log_verdict(state)
            self._state = state
            self._shared.store.update(state.training_job, state)

    def _log_verdict(self, state: TargetState) -> None:
        before = None if self._state is None else self._state.diagnosis
        diagnosis = state.diagnosis
        if diagnosis is not None and (before is None or _headline(diagnosis) != _headline(before)):
            level = logging.WARNING if state.incident is not None else logging.INFO
            verdict = f"{diagnosis.verdict} so far" if diagnosis.partial else diagnosis.verdict
            log.log(level, "training job %s: %s: %s", state.training_job, verdict, diagnosis.summary)


def _headline(diagnosis: Diagnosis) -> tuple[str, bool, str | None]:
    return diagnosis.verdict, diagnosis.partial, diagnosis.incident
