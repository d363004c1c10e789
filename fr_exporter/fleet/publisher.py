"""The thread that puts this node's records into a store, so that a store that is slow or down delays nothing else."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from random import random
from typing import Protocol

from fr_exporter.errors import StoreError
from fr_exporter.fleet.layout import Place, object_name
from fr_exporter.fleet.spool import Spool, Waiting
from fr_exporter.model import NodeRecords

# How long to wait at most after the first failure of an object, the second, and so on. Half of it is left to chance, so
# that the nodes of a job do not all come back to their store at once.
_BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)

log = logging.getLogger(__name__)


class ObjectWriter(Protocol):
    """Where objects go: an ObjectStore."""

    def write(self, path: str, data: bytes) -> None:
        """Write an object, in place of a former one. Raises StoreError."""


class PublishObserver(Protocol):
    """What the publisher tells of its work."""

    def published(self, result: str) -> None:
        """Count one attempt to publish; `result` is `published`, `failed`, `denied` or `dropped`."""

    def publish_delay(self, seconds: float) -> None:
        """Count the time from reading a dump to its record being in the store."""

    def spool_files(self, count: int) -> None:
        """Note how many objects wait to be published."""


class Publisher:
    """Publishes the latest records of each place. Other threads only make offers; all else is done in `run`.

    `encode` makes the object of a node's records, equal for equal records, and `stamp` adds the wall clock, in
    nanoseconds, at which it is sent. `jitter` gives numbers from 0 to 1.
    """

    def __init__(
        self,
        store: ObjectWriter,
        spool: Spool,
        telemetry: PublishObserver,
        *,
        encode: Callable[[NodeRecords], bytes],
        stamp: Callable[[bytes, int], bytes],
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
        jitter: Callable[[], float] = random,
    ) -> None:
        self._store = store
        self._spool = spool
        self._telemetry = telemetry
        self._encode = encode
        self._stamp = stamp
        self._clock = clock
        self._wall_ns = wall_ns
        self._jitter = jitter
        # Guards what other threads touch: the next four.
        self._changed = threading.Condition()
        self._offers: OrderedDict[Place, tuple[NodeRecords, float]] = OrderedDict()
        self._idle = False
        self._hurry = False
        self._closed = False
        # Guards the spool: `run` may hang in the store for longer than the process lasts.
        self._spooling = threading.Lock()
        self._left = False
        # The digest of what this process put into the store, by name.
        self._published: dict[str, bytes] = {}
        # Each is said once, and again only after all was published.
        self._said_failing = False
        self._said_dropping = False

    def offer(self, place: Place, records: NodeRecords, read_at: float) -> None:
        """Publish the records of a place soon, in place of all that was offered for it before. For any thread.

        `read_at` is when the newest of its dumps was read, by the monotonic clock.
        """
        with self._changed:
            self._offers[place] = records, read_at
            self._idle = False
            self._changed.notify_all()

    def run(self) -> None:
        """Work until `close`."""
        while not self._closed:
            try:
                self.step()
            except Exception:
                log.exception("publishing: internal error, please report it")
            with self._changed:
                wait_s = self._due() - self._clock()
                if wait_s > 0 and not self._closed:
                    self._changed.wait(min(wait_s, threading.TIMEOUT_MAX))
        self.leave()

    def step(self) -> float:
        """Take in one offer, else make one attempt to publish; return when something is due next."""
        with self._changed:
            offered = self._offers.popitem(last=False) if self._offers else None
            if self._hurry:
                self._spool.retry_now()
                self._hurry = False
        try:
            if offered is not None:
                place, (records, read_at) = offered
                self._take_in(object_name(place), self._encode(records), read_at)
            elif self._spool and self._spool.next().retry_at <= self._clock():
                self._upload(self._spool.next())
        finally:
            self._telemetry.spool_files(len(self._spool))
            with self._changed:
                self._idle = not self._offers and not self._spool
                self._changed.notify_all()
        return self._due()

    def drain(self, timeout_s: float) -> bool:
        """Wait until all that was offered is published; return whether it is. For any thread but that of `run`.

        What failed is tried once more at once: nothing may be left of the time when its turn comes.
        """
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._idle, timeout_s)

    def close(self) -> None:
        """End `run` soon; what is not published stays in the spool. For any thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def leave(self) -> None:
        """Leave to the next process what is not published, with what was offered while the store held `run` up.

        After `close`. For any thread, and only the first call counts.
        """
        with self._changed:
            offers = list(self._offers.items())
            self._offers.clear()
        for place, (records, read_at) in offers:
            try:
                self._take_in(object_name(place), self._encode(records), read_at)
            except Exception:
                log.exception("publishing: internal error, please report it")
        with self._spooling:
            if not self._left:
                self._left = True
                self._spool.close()

    def _due(self) -> float:
        if self._offers or self._hurry or self._closed:
            return -math.inf
        return self._spool.next().retry_at if self._spool else math.inf

    def _take_in(self, name: str, data: bytes, read_at: float) -> None:
        with self._spooling:
            waiting = self._spool.get(name)
            is_known = data == waiting.data if waiting is not None else _digest(data) == self._published.get(name)
            dropped = 0 if is_known or self._left else self._spool.put(name, data, read_at)
        for _ in range(dropped):
            self._telemetry.published("dropped")
        if dropped and not self._said_dropping:
            self._said_dropping = True
            log.warning("the spool is full, the oldest records are dropped; raise publish.spool_max_bytes to keep them")

    def _upload(self, waiting: Waiting) -> None:
        try:
            self._store.write(waiting.name, self._stamp(waiting.data, self._wall_ns()))
        except StoreError as error:
            self._failed(waiting, "denied" if error.denied else "failed")
            if not self._said_failing:
                self._said_failing = True
                log.warning("publishing fails, and is tried again until it works: %s", error)
        except Exception:
            self._failed(waiting, "failed")
            raise
        else:
            self._succeeded(waiting)

    def _failed(self, waiting: Waiting, result: str) -> None:
        self._telemetry.published(result)
        # It may have arrived all the same: what the store holds is not known any more.
        self._published.pop(waiting.name, None)
        longest_s = _BACKOFF_S[min(waiting.failures, len(_BACKOFF_S) - 1)]
        waiting.failures += 1
        waiting.retry_at = self._clock() + longest_s * (0.5 + 0.5 * self._jitter())

    def _succeeded(self, waiting: Waiting) -> None:
        with self._spooling:
            # It may be another object by now: what was offered meanwhile is to be published, too.
            if not self._left and self._spool.get(waiting.name) is waiting:
                self._spool.remove(waiting.name)
            # What has failed may work too, now that the store does.
            self._spool.retry_now()
        self._published[waiting.name] = _digest(waiting.data)
        self._telemetry.published("published")
        if waiting.read_at is not None:
            self._telemetry.publish_delay(self._clock() - waiting.read_at)
        if not self._spool:
            if self._said_failing:
                log.info("publishing works again, nothing is left to publish")
            self._said_failing = self._said_dropping = False


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
