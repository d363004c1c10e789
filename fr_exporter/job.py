"""One training job at work: its files, its present dump set, its verdict, its incident."""

from __future__ import annotations

import logging
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fr_exporter.config import (
    DEFAULT_PATTERN,
    AnalysisOptions,
    DumpSetOptions,
    IncidentOptions,
    Limits,
    Target,
    Topology,
)
from fr_exporter.diagnosis import Diagnosis
from fr_exporter.dumpset import DumpSetSettings, DumpSetTracker, Outcome
from fr_exporter.filenames import Matcher
from fr_exporter.incidents import IncidentLog, IncidentUpdate
from fr_exporter.metrics.telemetry import Telemetry
from fr_exporter.model import DumpFile, RankDump, UnreadableFile
from fr_exporter.pipeline import Pipeline, collector_paused, list_dumps, stat_dump
from fr_exporter.store import Store, TargetState
from fr_exporter.topology import locate_suspects, make_node_of
from fr_exporter.watch import Watcher

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
    """What all jobs share: where results go, and the clocks, monotonic in seconds and UTC in nanoseconds."""

    store: Store
    telemetry: Telemetry
    clock: Callable[[], float]
    wall_ns: Callable[[], int]


class Job:
    """Reads a job's dumps as they change and keeps its state in the store up to date. Belongs to one thread.

    Files of a fresh directory that were written before `since_ns` count as found at start-up.
    """

    def __init__(self, options: JobOptions, shared: Surroundings, since_ns: int) -> None:
        target = options.target
        self.options = options
        self._shared = shared
        self._matchers = _matchers(target)
        self._source = ", ".join(target.prefixes) if target.path is None else target.path
        self._pipeline = Pipeline(
            max_dump_bytes=options.limits.max_dump_bytes,
            max_ranks=options.limits.max_ranks,
            min_open_age_ns=int(options.analysis.min_open_age_s * 1e9),
            telemetry=shared.telemetry,
            node_of=make_node_of(options.topology, options.hosts),
        )
        self._tracker = DumpSetTracker(
            DumpSetSettings(
                training_job=options.training_job,
                source=self._source,
                scope=target.scope,
                world_size=target.world_size,
                window_s=options.dump_set.window_s,
                grace_s=options.dump_set.grace_s,
            )
        )
        self._incidents = IncidentLog(options.incidents.ttl_s)
        self._since_ns = since_ns
        # Of each file by directory: mtime and size when it was read, or why it could not be, which is tried again.
        self._files: dict[str, dict[str, tuple[int, int] | UnreadableFile]] = {path: {} for path in self._matchers}
        self._devices: dict[str, int] = {}
        self._changed: OrderedDict[str, None] = OrderedDict()
        self._awaited_mtimes: list[int] = []
        self._pending_ranks: set[int] = set()
        self._analyse_at = math.inf
        self._expires_at = math.inf
        self._diagnosis: Diagnosis | None = None
        self._last_analysis_ns: int | None = None
        self._latest = IncidentUpdate(diagnosis=None, incident=None, hang=False, changed=(), counted=None)
        self._state: TargetState | None = None

    @property
    def directories(self) -> tuple[str, ...]:
        """The directories that the job's files lie in."""
        return tuple(self._matchers)

    @property
    def deadline(self) -> float:
        """When `step` has something to do, if nothing changes before."""
        return -math.inf if self._changed else min(self._analyse_at, self._expires_at)

    def changed(self, path: str) -> None:
        """Note that something happened to a path in one of the directories."""
        self._changed[path] = None

    def compare(self, directories: Mapping[str, bool], watcher: Watcher) -> None:
        """Compare directories with what was read from them; True marks the fresh: new, back or replaced."""
        found = []
        for directory, is_fresh in directories.items():
            fresh = is_fresh or directory not in self._devices
            for file in self._list_directory(directory, watcher):
                if fresh and file.mtime_ns < self._since_ns:
                    found.append(file)
                else:
                    self._changed[file.path] = None
        if found:
            outcomes = self._pipeline.read_all(found)
            self._tracker.found(outcomes, now=self._shared.clock(), wall_ns=self._shared.wall_ns())
            for file, outcome in outcomes:
                self._remember(file, outcome)
            self._analyse_at = -math.inf

    def step(self, watcher: Watcher) -> None:
        """Read what changed, analyse when it is time, and put the result in the store."""
        self._read_changed(watcher)
        now = self._shared.clock()
        awaited: list[int] = []
        if now >= self._analyse_at:
            awaited, self._awaited_mtimes = self._awaited_mtimes, []
            self._analyse(now)
        elif now >= self._expires_at:
            self._conclude(now)
        self._publish(watcher)
        for mtime_ns in awaited:
            self._shared.telemetry.detection_latency((self._shared.wall_ns() - mtime_ns) / 1e9)

    def finish(self, watcher: Watcher) -> None:
        """Read and analyse all that changed, now."""
        while self._changed:
            self.step(watcher)
        self._analyse_at = -math.inf
        self.step(watcher)

    def close(self) -> None:
        """Close the incident of a job that is no longer watched, and drop its state."""
        self._diagnosis = None
        self._conclude(self._shared.clock())
        self._shared.store.forget(self.options.training_job)

    def _list_directory(self, directory: str, watcher: Watcher) -> list[DumpFile]:
        """Return the files that were not read as they are now, and forget those that are gone."""
        try:
            files = list_dumps(directory, *self._matchers[directory])
        except OSError as error:
            watcher.lost(directory, error)
            return []
        known = self._files[directory]
        device = watcher.device(directory)
        # An unmounted directory shows an empty one on another device: then nothing is gone.
        if device is not None and (files or self._devices.get(directory, device) == device):
            self._devices[directory] = device
            for path in known.keys() - {file.path for file in files}:
                del known[path]
                self._tracker.gone(path)
                self._soon()
        return [file for file in files if known.get(file.path) != (file.mtime_ns, file.size)]

    def _read_changed(self, watcher: Watcher) -> None:
        """Read changed files until the analysis is due: the first verdict must not wait for the last of thousands."""
        suspected: dict[str, bool] = {}
        with collector_paused():
            while self._changed and self._shared.clock() < self._analyse_at:
                path, _ = self._changed.popitem(last=False)
                directory = os.path.dirname(path)
                file = stat_dump(path, self._matchers[directory])
                if file is not None:
                    self._read(file, self._files[directory])
                elif path in self._files[directory]:
                    suspected[directory] = False
        # Only a listing proves a file gone: its whole directory may be out of reach.
        self.compare(suspected, watcher)

    def _read(self, file: DumpFile, known: dict[str, tuple[int, int] | UnreadableFile]) -> None:
        before = known.get(file.path)
        if before == (file.mtime_ns, file.size):
            return
        outcome = self._pipeline.read(file)
        self._remember(file, outcome)
        if isinstance(outcome, UnreadableFile) and outcome == before:
            return
        self._tracker.seen(file, outcome, now=self._shared.clock())
        self._soon()
        if isinstance(outcome, RankDump):
            self._awaited_mtimes.append(file.mtime_ns)
            if self._pending_ranks == {file.rank}:
                # The last one: there is nothing left to settle.
                self._analyse_at = -math.inf
            self._pending_ranks.discard(file.rank)

    def _remember(self, file: DumpFile, outcome: Outcome) -> None:
        known = self._files[os.path.dirname(file.path)]
        if not isinstance(outcome, UnreadableFile) or outcome.result == "partial":
            known[file.path] = (file.mtime_ns, file.size)
            return
        if known.get(file.path) != outcome:
            log.warning("training job %s: %s: %s", self.options.training_job, file.path, outcome.error)
        # What the system would not let us read can become readable without a change of the file.
        known[file.path] = outcome if outcome.result == "unreadable" else (file.mtime_ns, file.size)

    def _soon(self) -> None:
        """Analyse when settled, counted from the first change, so that changes cannot put it off for ever."""
        self._analyse_at = min(self._analyse_at, self._shared.clock() + self.options.dump_set.settle_s)

    def _analyse(self, now: float) -> None:
        present = self._tracker.present(now)
        deadline = self._tracker.deadline(now)
        self._analyse_at = math.inf if deadline is None else deadline
        self._last_analysis_ns = self._shared.wall_ns()
        has_files = present.dumps or present.unreadable
        self._diagnosis = self._pipeline.analyse(present, self._last_analysis_ns) if has_files else None
        if self._diagnosis is not None and self.options.hosts is not None:
            self._diagnosis = locate_suspects(self._diagnosis, self.options.hosts)
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

    def _publish(self, watcher: Watcher) -> None:
        up = [path for path in self._matchers if watcher.up(path)]
        state = TargetState(
            training_job=self.options.training_job,
            scope=self.options.target.scope,
            path=self._source,
            watch_up=bool(up),
            backend=watcher.backend(next(iter(up or self._matchers))),
            diagnosis=self._latest.diagnosis,
            hang=self._latest.hang if self._devices else None,
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
