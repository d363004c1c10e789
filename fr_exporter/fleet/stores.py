"""The stores of a configuration: which pollers there are, and which jobs they have found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from fr_exporter.config import Config, Target
from fr_exporter.errors import StoreError, UsageError
from fr_exporter.fleet.listing import RecordStore
from fr_exporter.fleet.objects import Objects, RecordObserver
from fr_exporter.fleet.poller import Act, Poller
from fr_exporter.pipeline import Pipeline
from fr_exporter.text import shown_url


def open_store(url: str) -> RecordStore:
    """Open the store at a URL. Raises StoreError."""
    # The drivers of stores would take a third of the start.
    from fr_exporter.fleet.objectstore import ObjectStore  # noqa: PLC0415

    try:
        return ObjectStore(url)
    except UsageError as error:
        raise StoreError(str(error)) from error


class Stores:
    """Has a poller for each target with a URL. Belongs to the worker's thread.

    `call` has a call made in that thread, and may be called from any; `changed` is called there when jobs appear or go.
    """

    def __init__(
        self,
        *,
        call: Callable[[Act], None],
        changed: Act,
        open_store: Callable[[str], RecordStore],
        telemetry: RecordObserver,
        clock: Callable[[], float],
        wall_ns: Callable[[], int],
    ) -> None:
        self._call = call
        self._changed = changed
        self._open_store = open_store
        self._telemetry = telemetry
        self._clock = clock
        self._wall_ns = wall_ns
        self._terms: tuple[float, int] | None = None
        self._pollers: dict[Target, Poller] = {}
        self._followed: dict[str, tuple[Target, Objects]] = {}
        # With discovery, by URL: the target, and the jobs that were found when it was last listed.
        self._roots: dict[str, Target] = {}
        self._found: dict[str, tuple[str, ...]] = {}
        self._down: set[str] = set()
        self._taken: list[Act] = []

    def configure(self, config: Config) -> None:
        """Poll the stores of a configuration, and go on with those that are the same."""
        targets = {target: target.url for target in config.targets if target.url is not None}
        terms = (config.watch.poll_interval_s, config.limits.max_dump_bytes)
        for target in list(self._pollers):
            if target not in targets or terms != self._terms:
                self._pollers.pop(target).close()
        self._terms = terms
        for target, url in targets.items():
            if target not in self._pollers:
                self._pollers[target] = self._make_poller(target, url, *terms)
                for training_job, (followed, objects) in self._followed.items():
                    if followed == target:
                        self._pollers[target].follow(training_job, objects)
        self._roots = {url: target for target, url in targets.items() if target.discover}
        self._found = {url: self._found.get(url, ()) for url in self._roots}
        self._down &= self._roots.keys()

    def start(self) -> None:
        """Have the pollers run, those that are new too."""
        for poller in self._pollers.values():
            poller.start()

    def close(self) -> None:
        """Let the pollers end."""
        for poller in self._pollers.values():
            poller.close()

    def roots(self) -> Iterator[tuple[str, Target, bool]]:
        """Yield the shown URL and the target of each store that holds many jobs, and whether those can be listed."""
        for url, target in self._roots.items():
            yield shown_url(url), target, url not in self._down

    def jobs(self) -> Iterator[tuple[str, str, Target]]:
        """Yield the name, the place and the target of each job that was found."""
        for url, training_jobs in self._found.items():
            for training_job in training_jobs:
                target = self._roots[url]
                yield training_job, self._pollers[target].place(training_job), target

    def follow(self, training_job: str, target: Target, pipeline: Pipeline, *, since_ns: int, ttl_ns: int) -> Objects:
        """Read a job's records from now on, and return what reads them."""
        poller = self._pollers[target]
        objects = Objects(
            poller.place(training_job),
            training_job,
            pipeline,
            self._telemetry,
            since_ns=since_ns,
            ttl_ns=ttl_ns,
            wall_ns=self._wall_ns,
        )
        self._followed[training_job] = target, objects
        poller.follow(training_job, objects)
        return objects

    def unfollow(self, training_job: str) -> None:
        """Read nothing more of a job, if it is followed."""
        if training_job in self._followed:
            target, _ = self._followed.pop(training_job)
            if target in self._pollers:
                self._pollers[target].unfollow(training_job)

    def acknowledge(self) -> None:
        """Let the pollers go on, if all is read that they brought."""
        if not any(objects.pending for _, objects in self._followed.values()):
            taken, self._taken = self._taken, []
            for go_on in taken:
                go_on()

    def hurry(self, done: Act) -> None:
        """Have every store polled now, and call `done` when all that is there is read."""
        left = list(self._pollers.values())

        def polled(poller: Poller) -> None:
            left.remove(poller)
            if not left:
                done()

        for poller in self._pollers.values():
            poller.hurry(partial(self._call, partial(polled, poller)))
        if not left:
            done()

    def _make_poller(self, target: Target, url: str, interval_s: float, max_object_bytes: int) -> Poller:
        return Poller(
            target,
            url,
            open_store=self._open_store,
            hand_over=lambda act, taken: self._call(lambda: self._take_in(act, taken)),
            discovered=lambda training_jobs: self._discovered(url, training_jobs),
            interval_s=interval_s,
            max_object_bytes=max_object_bytes,
            clock=self._clock,
            wall_ns=self._wall_ns,
        )

    def _take_in(self, act: Act, taken: Act) -> None:
        act()
        self._taken.append(taken)

    def _discovered(self, url: str, training_jobs: tuple[str, ...] | None) -> None:
        if url not in self._roots:  # taken out of the configuration meanwhile
            return
        if training_jobs is None:
            self._down.add(url)
            return
        self._down.discard(url)
        if training_jobs != self._found[url]:
            self._found[url] = training_jobs
            self._changed()
