"""What the exporter counts about itself, and the incidents it saw."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase

from fr_exporter._version import __version__
from fr_exporter.diagnosis import Cause
from fr_exporter.metrics.catalog import CATALOG, CAUSE, FILE_RESULT, PUBLISH_RESULT, STAGE
from fr_exporter.metrics.labels import clean
from fr_exporter.model import Scope


class Telemetry:
    """The exporter's counters, on a registry of its own. All methods may be called from any thread.

    It stands between its metrics and the registry to leave out the `_created` series: the client's own switch for them
    is global to the process, which is not ours to set when used as a library.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        build_info = _gauge("fr_exporter_build_info")
        build_info.labels(__version__, platform.python_version()).set(1)
        self._files = _counter("fr_exporter_dump_files_total")
        self._bytes = _counter("fr_exporter_dump_bytes_total")
        self._stage_seconds = _histogram("fr_exporter_stage_duration_seconds")
        self._stage_failures = _counter("fr_exporter_stage_failures_total")
        self._latency = _histogram("fr_exporter_detection_latency_seconds")
        self._clock_offset = _gauge("fr_exporter_clock_offset_seconds")
        self._published = _counter("fr_exporter_publish_total")
        self._spool_files = _gauge("fr_exporter_publish_spool_files")
        self._publish_delay = _histogram("fr_exporter_publish_delay_seconds")
        self._reload_successful = _gauge("fr_exporter_config_last_reload_successful")
        self._reload_time = _gauge("fr_exporter_config_last_reload_success_timestamp_seconds")
        self._incidents = _counter("fr_incidents_total")
        self._metrics: tuple[MetricWrapperBase, ...] = (
            self._incidents,
            build_info,
            self._files,
            self._bytes,
            self._stage_seconds,
            self._stage_failures,
            self._latency,
            self._clock_offset,
            self._published,
            self._spool_files,
            self._publish_delay,
            self._reload_successful,
            self._reload_time,
        )
        for result in FILE_RESULT.values:
            self._files.labels(result)
        for result in PUBLISH_RESULT.values:
            self._published.labels(result)
        for stage in STAGE.values:
            self._stage_seconds.labels(stage)
            self._stage_failures.labels(stage)
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        """Return the families the registry checks names by."""
        for metric in self._metrics:
            yield from metric.describe()

    def collect(self) -> Iterator[Metric]:
        """Return the families, without `_created` series."""
        for wrapper in self._metrics:
            for metric in wrapper.collect():
                metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
                yield metric

    def observe_stage(self, stage: str, seconds: float, failed: bool) -> None:
        """Count one pass through a stage (`read`, `parse`, `analyse`)."""
        self._stage_seconds.labels(stage).observe(seconds)
        if failed:
            self._stage_failures.labels(stage).inc()

    def file_read(self, result: str, size: int) -> None:
        """Count one dump file; `result` is `parsed`, `partial`, `rejected` or `unreadable`, `size` is in bytes."""
        self._files.labels(result).inc()
        self._bytes.inc(size)

    def detection_latency(self, seconds: float) -> None:
        """Count the time from a file's mtime to its verdict; a clock that runs ahead gives 0, never less."""
        self._latency.observe(max(0.0, seconds))

    def clock_offset(self, training_job: str, seconds: float) -> None:
        """Show how far ahead of the store's clock that of the node furthest off is."""
        self._clock_offset.labels(clean(training_job)).set(seconds)

    def published(self, result: str) -> None:
        """Count one attempt to publish; `result` is `published`, `failed`, `denied` or `dropped`."""
        self._published.labels(result).inc()

    def publish_delay(self, seconds: float) -> None:
        """Count the time from reading a dump to its record being in the store."""
        self._publish_delay.observe(seconds)

    def spool_files(self, count: int) -> None:
        """Note how many objects wait to be published."""
        self._spool_files.set(count)

    def reloaded(self, *, success: bool, time_s: float) -> None:
        """Note how the last load of the configuration went, at the start too; `time_s` is seconds since the epoch."""
        self._reload_successful.set(success)
        if success:
            self._reload_time.set(time_s)

    def job_added(self, training_job: str, scope: Scope) -> None:
        """Show the incident counter of a job, every cause at 0, so that its first increase is seen as one."""
        for cause in CAUSE.values:
            self._incidents.labels(clean(training_job), scope, cause)

    def job_forgotten(self, training_job: str, scope: Scope) -> None:
        """Drop what is shown of a job that is gone."""
        with suppress(KeyError):  # it came from directories
            self._clock_offset.remove(clean(training_job))
        for cause in CAUSE.values:
            self._incidents.remove(clean(training_job), scope, cause)

    def incident_opened(self, training_job: str, scope: Scope, cause: Cause) -> None:
        """Count an incident."""
        self._incidents.labels(clean(training_job), scope, cause.value).inc()


def _gauge(name: str) -> Gauge:
    spec = CATALOG[name]
    return Gauge(spec.name, spec.help, spec.label_names, registry=None)


def _counter(name: str) -> Counter:
    spec = CATALOG[name]
    return Counter(spec.name, spec.help, spec.label_names, registry=None)


def _histogram(name: str) -> Histogram:
    spec = CATALOG[name]
    return Histogram(spec.name, spec.help, spec.label_names, buckets=spec.buckets, registry=None)
