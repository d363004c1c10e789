"""The one thread that watches, reads and analyses for every target; the rest of the daemon reads the store.

Stores of records are looked at in threads of their own, since they may hang; what those bring is read here.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from fr_exporter.config import DEFAULT_PATTERN, Config, Target
from fr_exporter.directory import Directories
from fr_exporter.filenames import Matcher
from fr_exporter.fleet.listing import RecordStore
from fr_exporter.fleet.stores import Stores, open_store
from fr_exporter.job import Job, JobOptions, Surroundings
from fr_exporter.metrics.telemetry import Telemetry
from fr_exporter.model import DumpSet
from fr_exporter.pipeline import Pipeline, list_dumps
from fr_exporter.source import Source
from fr_exporter.store import Store, TargetState
from fr_exporter.topology import make_node_of
from fr_exporter.watch import Watcher

# The events of one write come in a burst: wait for its end before reading.
_BURST_S = 0.05

log = logging.getLogger(__name__)


class Worker:
    """Runs the jobs of a configuration. Other threads only put messages in its inbox: paths, and calls to make."""

    def __init__(
        self,
        config: Config,
        hosts: tuple[str, ...] | None,
        store: Store,
        telemetry: Telemetry,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
        open_store: Callable[[str], RecordStore] = open_store,
        publish: Callable[[DumpSet], None] | None = None,
    ) -> None:
        self.ready = threading.Event()
        self._shared = Surroundings(store, telemetry, clock, wall_ns, publish)
        self._inbox: queue.SimpleQueue[str | Callable[[], None]] = queue.SimpleQueue()
        self._jobs: dict[str, Job] = {}
        self._directories: dict[str, Directories] = {}
        self._directories_of: dict[str, list[Directories]] = {}
        self._roots: dict[str, Target] = {}
        self._discovered: dict[str, list[str]] = {}
        self._clashes: set[str] = set()
        self._stopped = False
        self._watcher = Watcher(config.watch, self._inbox.put)
        self._stores = Stores(
            call=self._inbox.put,
            changed=self._reconcile,
            open_store=open_store,
            telemetry=telemetry,
            clock=clock,
            wall_ns=wall_ns,
        )
        self._configure(config, hosts)

    def run(self) -> None:
        """Work until `stop`."""
        while not self._stopped:
            self._stores.start()
            self._receive(self.step() - self._shared.clock())
        self._watcher.close()
        self._stores.close()

    def stop(self) -> None:
        """End `run` soon. For any thread."""
        self._inbox.put(self._stop)

    def reload(self, config: Config, hosts: tuple[str, ...] | None) -> None:
        """Work by another configuration; jobs for which nothing changes keep their state. For any thread."""
        self._inbox.put(lambda: self._configure(config, hosts))

    def catch_up(self, done: Callable[[], None]) -> None:
        """List, read and analyse everything now, then call `done`. For any thread."""
        self._inbox.put(lambda: self._catch_up(done))

    def step(self) -> float:
        """Do all that is due; return when something is due next."""
        now = self._shared.clock()
        # Discovery adds directories, which the next check returns.
        while listings := self._watcher.check(now):
            self._discover(listings.keys() & self._roots.keys())
            for name, directories in self._directories.items():
                own = {path: listings[path] for path in directories.paths if path in listings}
                if own:
                    with _guarded(name):
                        directories.compare(own, self._jobs[name])
        for name, job in self._jobs.items():
            with _guarded(name):
                job.step()
        self._publish_roots()
        self._stores.acknowledge()
        self.ready.set()
        return min([self._watcher.deadline, *(job.deadline for job in self._jobs.values())])

    def _receive(self, timeout: float) -> None:
        """Wait for a message at most `timeout` seconds and take it in, with all that come in its burst."""
        try:
            message = self._inbox.get(timeout=max(0.0, timeout))
            time.sleep(_BURST_S)
            while True:
                self._take_in(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _take_in(self, message: str | Callable[[], None]) -> None:
        if not isinstance(message, str):
            message()
            return
        directory = os.path.dirname(message)
        for directories in self._directories_of.get(directory, ()):
            directories.changed(message)
        if directory in self._roots:
            self._watcher.relist(directory)

    def _stop(self) -> None:
        self._stopped = True

    def _catch_up(self, done: Callable[[], None]) -> None:
        for directory in (*self._roots, *self._directories_of):
            self._watcher.relist(directory)
        self.step()
        self._stores.hurry(lambda: self._finish(done))

    def _finish(self, done: Callable[[], None]) -> None:
        for name, job in self._jobs.items():
            with _guarded(name):
                job.finish()
        done()

    def _configure(self, config: Config, hosts: tuple[str, ...] | None) -> None:
        if config.watch != self._watcher.options:
            self._watcher.close()
            self._watcher = Watcher(config.watch, self._inbox.put)
            for directories in self._directories.values():
                directories.watcher = self._watcher
        for root in (*self._roots, *(url for url, _, _ in self._stores.roots())):
            self._shared.store.forget(root)
        self._config = config
        self._hosts = hosts
        self._since_ns = self._shared.wall_ns()
        self._roots = {
            os.path.normpath(target.path): target for target in config.targets if target.discover and target.path
        }
        self._discovered = {root: self._discovered.get(root, []) for root in self._roots}
        self._stores.configure(config)
        self._reconcile()

    def _discover(self, roots: Iterable[str]) -> None:
        for root in roots:
            try:
                self._discovered[root] = find_jobs(root, self._roots[root], self._shared.wall_ns())
            except OSError as error:
                self._watcher.lost(root, error)
        self._reconcile()

    def _reconcile(self) -> None:
        """Add, replace and drop jobs until they are those of the configuration and of the discovery."""
        wanted = self._wanted()
        for name, job in list(self._jobs.items()):
            if name not in wanted or wanted[name].target.scope != job.options.target.scope:
                self._drop(name)
        new = [
            name for name, options in wanted.items() if name not in self._jobs or self._jobs[name].options != options
        ]
        for name in new:
            self._add(name, wanted[name])
        self._directories_of = {}
        for directories in self._directories.values():
            for path in directories.paths:
                self._directories_of.setdefault(path, []).append(directories)
        # The directory above tells when a job's is gone, or cannot be told.
        discovered = (path for paths in self._discovered.values() for path in paths)
        self._watcher.require({*self._directories_of, *self._roots}, transient=discovered)
        for name in new:
            if name in self._directories:
                for path in self._directories[name].paths:
                    self._watcher.relist(path)

    def _add(self, name: str, options: JobOptions) -> None:
        pipeline = _make_pipeline(options, self._shared.telemetry)
        source = self._make_source(name, options, pipeline)
        self._jobs[name] = Job(options, source, pipeline, self._shared)
        self._shared.telemetry.job_added(name, options.target.scope)

    def _make_source(self, name: str, options: JobOptions, pipeline: Pipeline) -> Source:
        """Read a job's dumps from where its options say, and from nowhere else."""
        target = options.target
        self._stores.unfollow(name)
        self._directories.pop(name, None)
        if target.url is not None:
            ttl_ns = int(options.incidents.ttl_s * 1e9)
            objects = self._stores.follow(name, target, pipeline, since_ns=self._since_ns, ttl_ns=ttl_ns)
            log.info("training job %s: records are expected in %s", name, objects.name)
            return objects
        directories = Directories(name, target, pipeline, self._watcher, self._since_ns)
        self._directories[name] = directories
        log.info("training job %s: dumps are expected in %s", name, ", ".join(directories.paths))
        return directories

    def _drop(self, name: str) -> None:
        job = self._jobs.pop(name)
        self._directories.pop(name, None)
        self._stores.unfollow(name)
        with _guarded(name):
            job.close()
        self._shared.telemetry.job_forgotten(name, job.options.target.scope)
        log.info("training job %s: no longer watched", name)

    def _wanted(self) -> dict[str, JobOptions]:
        """Return what each job is to work by; a name that is taken stays with the first that has it."""
        config = self._config
        targets = {target.training_job: target for target in config.targets if target.training_job is not None}
        for name, place, target in (*self._jobs_in_directories(), *self._stores.jobs()):
            if targets.setdefault(name, target) != target and place not in self._clashes:
                self._clashes.add(place)
                log.warning("%s is not watched: there is another training job of that name", place)
        return {
            name: JobOptions(
                training_job=name,
                target=target,
                dump_set=config.dump_set,
                analysis=config.analysis,
                incidents=config.incidents,
                limits=config.limits,
                topology=config.topology,
                hosts=self._hosts,
            )
            for name, target in targets.items()
        }

    def _jobs_in_directories(self) -> Iterator[tuple[str, str, Target]]:
        """Yield the name, the place and the target of each job that has a directory of its own."""
        for root, paths in self._discovered.items():
            for path in paths:
                yield os.path.basename(path), path, replace(self._roots[root], path=path, discover=False)

    def _publish_roots(self) -> None:
        """Show the directories and stores of jobs that cannot be listed: no job below them would tell."""
        watcher = self._watcher
        directories = ((root, target, watcher.up(root), watcher.backend(root)) for root, target in self._roots.items())
        stores = ((url, target, is_up, "polling") for url, target, is_up in self._stores.roots())
        for root, target, is_up, backend in (*directories, *stores):
            if is_up:
                self._shared.store.forget(root)
                continue
            state = TargetState(
                training_job="",
                scope=target.scope,
                path=root,
                watch_up=False,
                backend=backend,
                diagnosis=None,
                hang=False,
                incident=None,
                last_analysis_ns=None,
            )
            self._shared.store.update(root, state)


def _make_pipeline(options: JobOptions, telemetry: Telemetry) -> Pipeline:
    return Pipeline(
        max_dump_bytes=options.limits.max_dump_bytes,
        max_ranks=options.limits.max_ranks,
        min_open_age_ns=int(options.analysis.min_open_age_s * 1e9),
        telemetry=telemetry,
        node_of=make_node_of(options.topology, options.hosts),
    )


def find_jobs(root: str, target: Target, now_ns: int) -> list[str]:
    """Return the sub-directories of `root` in which something changed within the target's `discover_ttl`, sorted.

    Raises OSError where `root` cannot be listed.
    """
    oldest_ns = now_ns - int(target.discover_ttl_s * 1e9)
    matcher = Matcher.from_pattern(target.pattern or DEFAULT_PATTERN)
    with os.scandir(root) as entries:
        directories = [entry for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    # A link such as `latest` to the directory of a job is no other job: the directory itself comes last, and stays.
    directories.sort(key=lambda entry: (not entry.is_symlink(), entry.name))
    paths = {os.path.realpath(entry.path): entry.path for entry in directories}
    return sorted(path for path in paths.values() if _changed_since(path, matcher, oldest_ns))


def _changed_since(path: str, matcher: Matcher, oldest_ns: int) -> bool:
    """Tell whether a directory or a dump in it changed; one that cannot be read counts, so that somebody says so."""
    try:
        if os.stat(path).st_mtime_ns >= oldest_ns:
            return True
        return any(file.mtime_ns >= oldest_ns for file in list_dumps(path, matcher))
    except FileNotFoundError:
        return False
    except OSError:
        return True


@contextmanager
def _guarded(training_job: str) -> Iterator[None]:
    """Keep a fault of ours in one job from ending the work for all others."""
    try:
        yield
    except Exception:
        log.exception("training job %s: internal error, please report it", training_job)
