"""Every metric of fr_exporter, as data.

A name that is not here cannot be exported, and docs/metrics.md is made from this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fr_exporter.diagnosis import AttributionState, Cause, Confidence, MismatchKind, Verdict
from fr_exporter.model import Kind, Scope

MetricType = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class Label:
    """A label, and the values it can have where they are fixed."""

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric family. `buckets` are the upper bounds of a histogram, in seconds."""

    name: str
    type: MetricType
    labels: tuple[Label, ...]
    help: str
    buckets: tuple[float, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the labels, in the order in which values are given."""
        return tuple(label.name for label in self.labels)


CAUSE = Label("cause", tuple(cause.value for cause in Cause))
VERDICT = Label("verdict", ("none", *get_args(Verdict)))
RANK_STATE = Label("state", ("dumped", "missing", "pending", "stale", "unreadable", "remote"))
DEVICE = Label("device", ("gpu", "nic"))
FILE_RESULT = Label("result", ("parsed", "partial", "rejected", "unreadable"))
PUBLISH_RESULT = Label("result", ("published", "failed", "denied", "dropped"))
STAGE = Label("stage", ("read", "parse", "analyse"))
CONFIDENCE = Label("confidence", get_args(Confidence))
ATTRIBUTION_STATE = Label("attribution_state", tuple(state.value for state in AttributionState))
BACKEND = Label("backend", ("inotify", "polling"))
CALL_KIND = Label("kind", get_args(Kind))
MISMATCH_KIND = Label("kind", get_args(MismatchKind))
OPERATION = Label("operation")
TRAINING_JOB = Label("training_job")

JOB = (TRAINING_JOB, Label("scope", get_args(Scope)))
GROUP = (Label("process_group"), Label("process_group_desc"))
RANK = (Label("rank"), Label("rank_node"))


@dataclass(frozen=True, slots=True)
class Section:
    """Metrics that are read together, under one heading of docs/metrics.md."""

    title: str
    metrics: tuple[MetricSpec, ...]


SECTIONS = (
    Section(
        "Verdict and incident",
        (
            MetricSpec(
                "fr_hang", "gauge", JOB, "1 while an incident is open; absent before the directory was first read."
            ),
            MetricSpec(
                "fr_verdict",
                "gauge",
                (*JOB, VERDICT),
                "1 for the current verdict, 0 for the others; none: no dumps yet.",
            ),
            MetricSpec("fr_diagnosis_partial", "gauge", JOB, "1 while ranks may still be writing their dumps."),
            MetricSpec(
                "fr_incident_info",
                "gauge",
                (
                    *JOB,
                    Label("incident"),
                    CAUSE,
                    ATTRIBUTION_STATE,
                    Label("suspects"),
                    Label("suspect_nodes"),
                    *GROUP,
                    OPERATION,
                    Label("seq_id"),
                ),
                "1 while an incident is open, from the moment its dump set is complete or its grace is over.",
            ),
            MetricSpec(
                "fr_hung_process_group", "gauge", (*JOB, *GROUP, OPERATION, CAUSE), "1 for each hung process group."
            ),
            MetricSpec(
                "fr_hung_collective_seq_id",
                "gauge",
                (*JOB, *GROUP, CALL_KIND),
                "Sequence ID of the call that is stuck.",
            ),
            MetricSpec(
                "fr_hang_start_timestamp_seconds", "gauge", JOB, "When the stuck call was issued by its oldest waiter."
            ),
        ),
    ),
    Section(
        "Ranks",
        (
            MetricSpec(
                "fr_suspect_ranks", "gauge", (*JOB, CAUSE), "Number of suspect ranks; every cause is always present."
            ),
            MetricSpec("fr_suspect_rank", "gauge", (*JOB, *RANK, CAUSE, CONFIDENCE), "1 for each suspect rank."),
            MetricSpec("fr_waiting_ranks", "gauge", JOB, "Ranks with a dump here that are stuck in a call."),
            MetricSpec(
                "fr_rank_last_enqueued_seq_id",
                "gauge",
                (*JOB, *RANK, *GROUP, CALL_KIND),
                "Sequence ID of the last call the rank issued in the group; absent where its dump does not tell.",
            ),
            MetricSpec(
                "fr_rank_last_started_seq_id",
                "gauge",
                (*JOB, *RANK, *GROUP, CALL_KIND),
                "Sequence ID of the last call that started on the rank's device; absent where timing is off.",
            ),
            MetricSpec(
                "fr_rank_last_completed_seq_id",
                "gauge",
                (*JOB, *RANK, *GROUP, CALL_KIND),
                "Sequence ID of the last call the rank completed in the group; absent where its dump does not tell.",
            ),
            MetricSpec(
                "fr_rank_open_operations",
                "gauge",
                (*JOB, *RANK, *GROUP),
                "Calls the rank issued in the group that are not done.",
            ),
            MetricSpec("fr_rank_dump_timestamp_seconds", "gauge", (*JOB, *RANK), "When the rank's dump was written."),
            MetricSpec(
                "fr_rank_health",
                "gauge",
                (*JOB, *RANK, DEVICE),
                "1 healthy, 0 not, as the dump's health_check_results say; absent where it has none.",
            ),
        ),
    ),
    Section(
        "Dump set",
        (
            MetricSpec(
                "fr_dump_set_expected_ranks", "gauge", JOB, "Ranks that should dump here; absent before any did."
            ),
            MetricSpec("fr_dump_set_ranks", "gauge", (*JOB, RANK_STATE), "Number of ranks in each state."),
            MetricSpec(
                "fr_collective_mismatches",
                "gauge",
                (*JOB, *GROUP, MISMATCH_KIND),
                "Open collectives that are not the same on all ranks.",
            ),
        ),
    ),
    Section(
        "Incident history",
        (
            MetricSpec(
                "fr_incidents_total",
                "counter",
                (*JOB, CAUSE),
                "Incidents opened while running, counted once when final; dumps found at start-up do not count.",
            ),
        ),
    ),
    Section(
        "The exporter itself",
        (
            MetricSpec(
                "fr_exporter_build_info",
                "gauge",
                (Label("version"), Label("python")),
                "Always 1; the labels say which versions run.",
            ),
            MetricSpec("fr_exporter_dump_files_total", "counter", (FILE_RESULT,), "Dump files read."),
            MetricSpec("fr_exporter_dump_bytes_total", "counter", (), "Bytes of the dump files read."),
            MetricSpec(
                "fr_exporter_stage_duration_seconds",
                "histogram",
                (STAGE,),
                "Time one pass through a stage takes: read and parse a file, analyse a dump set.",
                buckets=(0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0),
            ),
            MetricSpec("fr_exporter_stage_failures_total", "counter", (STAGE,), "Passes through a stage that failed."),
            MetricSpec(
                "fr_exporter_detection_latency_seconds",
                "histogram",
                (),
                "From a dump file's mtime to the verdict being visible; not for files found at start-up.",
                buckets=(0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0),
            ),
            MetricSpec(
                "fr_exporter_last_analysis_timestamp_seconds",
                "gauge",
                (TRAINING_JOB,),
                "When the job was last analysed.",
            ),
            MetricSpec(
                "fr_exporter_watch_up",
                "gauge",
                (TRAINING_JOB, Label("path"), BACKEND),
                "1 while the directory is watched, 0 while it cannot be.",
            ),
            MetricSpec(
                "fr_exporter_clock_offset_seconds",
                "gauge",
                (TRAINING_JOB,),
                "How far ahead of the store's clock that of a node is, of all nodes the one furthest off; "
                "their times are corrected. Only of jobs that are read from a store.",
            ),
            MetricSpec(
                "fr_exporter_publish_total",
                "counter",
                (PUBLISH_RESULT,),
                "Attempts to publish this node's records; dropped: given up because the spool was full.",
            ),
            MetricSpec("fr_exporter_publish_spool_files", "gauge", (), "Objects that wait to be published."),
            MetricSpec(
                "fr_exporter_publish_delay_seconds",
                "histogram",
                (),
                "From reading the newest dump of an object to the object being in the store; "
                "not for what waited in the spool at start-up.",
                buckets=(0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0),
            ),
            MetricSpec(
                "fr_exporter_config_last_reload_successful",
                "gauge",
                (),
                "1 if the configuration was last loaded without error, 0 if the former one was kept.",
            ),
            MetricSpec(
                "fr_exporter_config_last_reload_success_timestamp_seconds",
                "gauge",
                (),
                "When a configuration was last loaded without error.",
            ),
            MetricSpec(
                "fr_exporter_series_dropped", "gauge", (Label("metric"),), "Series left out because of limits.*."
            ),
        ),
    ),
    # Shown by prometheus_client's own collector, in its words.
    Section(
        "The process, on Linux",
        (
            MetricSpec("process_virtual_memory_bytes", "gauge", (), "Virtual memory size in bytes."),
            MetricSpec("process_resident_memory_bytes", "gauge", (), "Resident memory size in bytes."),
            MetricSpec(
                "process_start_time_seconds", "gauge", (), "Start time of the process since unix epoch in seconds."
            ),
            MetricSpec("process_cpu_seconds_total", "counter", (), "Total user and system CPU time spent in seconds."),
            MetricSpec("process_open_fds", "gauge", (), "Number of open file descriptors."),
            MetricSpec("process_max_fds", "gauge", (), "Maximum number of open file descriptors."),
        ),
    ),
)

CATALOG: dict[str, MetricSpec] = {spec.name: spec for section in SECTIONS for spec in section.metrics}
