"""Removes old records from a store, a part at a time, so that nothing waits for it."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from fr_exporter.errors import StoreError
from fr_exporter.fleet.layout import parse_attempt, parse_name
from fr_exporter.fleet.listing import RecordStore
from fr_exporter.fleet.pool import Pool

if TYPE_CHECKING:
    pass

# How many requests are made in one part.
REQUESTS = 64
_INTERVAL_S = 3600.0

log = logging.getLogger(__name__)


class Retention:
    """Goes through a store at the start and every hour, and removes objects older than `retention_s`.

    `job` is the folder of the only job to go through; None: all there are. What is not named as records are stays.
    """

    def __init__(self, shown_url: str, job: str | None, retention_s: float) -> None:
        self._shown_url = shown_url
        self._job = job
        self._retention_ns = int(retention_s * 1e9)
        self._due = -math.inf
        # Each is one request, which gives further ones.
        self._requests: deque[Callable[[], Iterable[Any]]] = deque()
        self._failed = False

    def step(self, store: RecordStore, pool: Pool, *, now: float, wall_ns: int) -> None:
        """Do a part of what is due; `now` is a monotonic clock in seconds. Raises StoreError where the store hangs."""
        if not self._requests and now >= self._due:
            self._due = now + _INTERVAL_S
            self._failed = False
            oldest_ns = wall_ns - self._retention_ns
            jobs = partial(_jobs, store, oldest_ns)
            self._requests.append(jobs if self._job is None else partial(_attempts, store, oldest_ns, self._job))
        part = [self._requests.popleft() for _ in range(min(REQUESTS, len(self._requests)))]
        for outcome in pool.results(part):
            if isinstance(outcome, StoreError):
                self._say(outcome)
            else:
                self._requests.extend(outcome)

    def _say(self, error: StoreError) -> None:
        if not self._failed:
            log.warning(
                "old records in %s cannot be removed, which is tried again in an hour: %s", self._shown_url, error
            )
        self._failed = True


def _jobs(store: RecordStore, oldest_ns: int) -> Iterable[Any]:
    jobs = store.folders("")
    return [partial(_attempts, store, oldest_ns, job) for job in jobs if parse_name(job) is not None]


def _attempts(store: RecordStore, oldest_ns: int, job: str) -> Iterable[Any]:
    attempts = [attempt for attempt in store.folders(job) if parse_attempt(attempt) is not None]
    return [partial(_objects, store, oldest_ns, f"{job}/{attempt}") for attempt in attempts]


def _objects(store: RecordStore, oldest_ns: int, folder: str) -> Iterable[Any]:
    old = [info.name for info in store.objects(folder) if info.mtime_ns < oldest_ns]
    return [partial(_remove, store, f"{folder}/{name}") for name in old if parse_name(name) is not None]


def _remove(store: RecordStore, path: str) -> Iterable[Any]:
    store.remove(path)
    return ()
