"""Where a node's dump sets leave for the fleet: the publisher, its spool and its store, put together."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

from fr_exporter.analysis.progress import with_accounts
from fr_exporter.config import Publish, Topology
from fr_exporter.fleet.layout import Place, object_name
from fr_exporter.fleet.objectstore import ObjectStore
from fr_exporter.fleet.publisher import Publisher, PublishObserver
from fr_exporter.fleet.spool import Spool
from fr_exporter.model import DumpSet, NodeRecords
from fr_exporter.parsing import record

log = logging.getLogger(__name__)


class Outlet:
    """Publishes the dump sets of a node's jobs from a thread of its own."""

    def __init__(self, options: Publish, topology: Topology, telemetry: PublishObserver) -> None:
        """Open the store and take over what waits in the spool.

        Raises UsageError where the URL cannot be used; that nothing answers there is no error.
        """
        if options.url is None or topology.node is None:
            raise ValueError("without publish.url and topology.node there is nowhere to publish to")
        self._options = options
        self._node = topology.node
        self._publisher = Publisher(
            ObjectStore(options.url),
            Spool(options.spool_dir, options.url, options.spool_max_bytes),
            telemetry,
            encode=self._encode,
            stamp=record.stamp,
        )
        self._unnamed: set[str] = set()
        self._thread = threading.Thread(target=self._publisher.run, name="publisher", daemon=True)

    def start(self) -> None:
        """Begin to publish."""
        self._thread.start()

    def publish(self, dump_set: DumpSet) -> None:
        """Publish a set soon, in place of the one before. Never waits; for one thread."""
        options = self._options
        place = Place(options.training_job or dump_set.training_job, options.attempt, self._node)
        try:
            object_name(place)
        except ValueError as error:  # a discovered directory may have any name
            if place.training_job not in self._unnamed:
                self._unnamed.add(place.training_job)
                log.warning("training job %s is not published: %s", place.training_job, error)
            return
        dumps = tuple(dump_set.dumps.values())
        records = NodeRecords(place.training_job, place.attempt, place.node, dumps, dump_set.unreadable)
        self._publisher.offer(place, records, time.monotonic())

    def stop(self, timeout_s: float) -> None:
        """End, when all is published or the time is over; what is left then is in the spool."""
        self._publisher.drain(timeout_s)
        self._publisher.close()
        self._thread.join(timeout_s)
        self._publisher.leave()

    def _encode(self, records: NodeRecords) -> bytes:
        # Here and not in the thread that reads dumps: the first verdict does not wait for it.
        accounted = replace(records, dumps=tuple(map(with_accounts, records.dumps)))
        return record.encode(accounted, self._options.recent_calls)
