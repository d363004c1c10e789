"""The dashboard of the exporters themselves: whether their word can be relied on."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.source import queries
from dashboards.source.panels import (
    EXPORTER,
    GREEN,
    ORANGE,
    ORANGE_FROM_1,
    RED,
    YELLOW,
    Column,
    Panel,
    board,
    instance,
    lines,
    stat,
    table,
    training_job,
    value_texts,
)

AT = 'instance=~"$instance"'
OF_JOBS = 'training_job=~"$training_job"'
UP = queries.exporters(AT)
# Other processes have metrics of these names too.
OF_EXPORTERS = f"and on ({queries.EXPORTER}) fr_exporter_build_info"

UP_TEXTS = value_texts({"1": ("up", GREEN), "0": ("down", RED)})
OK_TEXTS = value_texts({"1": ("yes", GREEN), "0": ("no", ORANGE)})


def dashboard() -> Dashboard:
    """Return the dashboard of the exporters."""
    return board(
        EXPORTER,
        "Flight-recorder exporter",
        "Whether the exporters are up, watch their directories and stores, and analyse dumps in time.",
        variables=[training_job(several=True), instance()],
        sections=[
            (None, [*_numbers(), _exporters(), _watches()]),
            ("From dump to verdict", [_latency(), _durations(), _failures(), _files(), _bytes(), _last_analysis()]),
            ("Publishing", [_published(), _spool(), _publish_delay()]),
            ("Process", [_memory(), _cpu(), _open_files(), _dropped()]),
        ],
        incidents_of=OF_JOBS,
        hours=6,
    )


def _numbers() -> list[Panel]:
    latency = f"sum by (le) (increase(fr_exporter_detection_latency_seconds_bucket{{{AT}}}[$__range]))"
    return [
        stat(
            "Exporters up",
            "Exporters that answer Prometheus.",
            f"count({UP} == 1) or vector(0)",
            width=4,
            steps=((None, RED), (1, GREEN)),
        ),
        stat(
            "Exporters down",
            "Exporters that answered within the last day and do not now. They are blind to hangs.",
            f"count({UP} == 0) or vector(0)",
            width=4,
            steps=((None, GREEN), (1, RED)),
        ),
        stat(
            "Places not watched",
            "Directories that are absent, not readable or not mounted, and stores that cannot be read. A hang there"
            " goes unseen.",
            f"count(fr_exporter_watch_up{{{AT}, {OF_JOBS}}} == 0) or vector(0)",
            width=4,
            steps=((None, GREEN), (1, RED)),
        ),
        stat(
            "Dump to verdict, p99",
            "99 of 100 dumps were in a visible verdict after this time, in the time range. Includes dump_set.settle.",
            f"histogram_quantile(0.99, {latency})",
            width=4,
            unit="s",
            decimals=1,
            steps=((None, GREEN), (10, ORANGE)),
            no_value="No dumps in this time",
        ),
        stat(
            "Failures",
            "Passes through a stage that failed in the time range. Half-written files fail and are read again, so that"
            " some are normal.",
            f"round(sum(increase(fr_exporter_stage_failures_total{{{AT}}}[$__range]))) or vector(0)",
            width=4,
        ),
        stat(
            "Series left out",
            "Series that limits.* keep from Prometheus. 0: nothing is missing.",
            f"max(fr_exporter_series_dropped{{{AT}}}) or vector(0)",
            width=4,
            steps=ORANGE_FROM_1,
        ),
    ]


def _exporters() -> Panel:
    by = "cluster, namespace, instance"
    return table(
        "Exporters",
        "Version, and whether the configuration was last loaded without error. After a failed reload the former one"
        " stays in force.",
        [
            f"max by ({by}) ({UP})",
            f"max by ({by}, version, python) (fr_exporter_build_info{{{AT}}})",
            f"min by ({by}) (fr_exporter_config_last_reload_successful{{{AT}}})",
            f"time() - max by ({by}) (fr_exporter_config_last_reload_success_timestamp_seconds{{{AT}}})",
        ],
        [
            Column("instance", "Exporter"),
            Column("Value #A", "State", 80, unit="none", texts=UP_TEXTS),
            Column("version", "Version", 100),
            Column("python", "Python", 100),
            Column("Value #C", "Configuration good", 150, unit="none", texts=OK_TEXTS),
            Column("Value #D", "Loaded, ago", 120, unit="s", decimals=0),
        ],
        width=12,
        height=8,
        no_value="No exporter in this time",
        sort=[("State", False)],
    )


def _watches() -> Panel:
    by = "cluster, namespace, instance, training_job, path, backend"
    return table(
        "Watched directories and stores",
        "Down: the directory is absent, not readable or not mounted, or the store cannot be read. A job whose place is"
        " down is not watched.",
        [f"min by ({by}) (fr_exporter_watch_up{{{AT}, {OF_JOBS}}})"],
        [
            Column("training_job", "Job", 150),
            Column("Value", "Watch", 80, unit="none", texts=UP_TEXTS),
            Column("path", "Path"),
            Column("backend", "Backend", 90),
            Column("instance", "Exporter", 150),
        ],
        width=12,
        height=8,
        no_value="Nothing is watched",
        sort=[("Watch", False)],
    )


def _latency() -> Panel:
    return _quantiles(
        "Dump to verdict",
        "From a dump file's mtime to the verdict being visible, over all exporters. Gaps: no dumps came.",
        "fr_exporter_detection_latency_seconds",
        no_value="No dumps in this time",
    )


def _durations() -> Panel:
    metric = "fr_exporter_stage_duration_seconds"
    of_stage = f"sum by (stage) (rate({metric}_sum{{{AT}}}[$__rate_interval]))"
    passes = f"sum by (stage) (rate({metric}_count{{{AT}}}[$__rate_interval]))"
    return lines(
        "Time of a pass through a stage",
        "Mean over the passes: to read a file, to parse it, to analyse the dump set. Gaps: nothing was done.",
        [(f"{of_stage} / ({passes} > 0)", "{{stage}}")],
        width=8,
        unit="s",
        points=True,
        no_value="No dumps in this time",
    )


def _failures() -> Panel:
    return lines(
        "Failures by stage",
        "Passes that failed. Reading and parsing fail for half-written files, which are read again. A failed analysis"
        " is a fault of the exporter: its log has the reason.",
        [(f"sum by (stage) (increase(fr_exporter_stage_failures_total{{{AT}}}[$__rate_interval]))", "{{stage}}")],
        width=8,
        decimals=0,
        colors={"analyse": RED, "parse": ORANGE, "read": YELLOW},
    )


def _files() -> Panel:
    return lines(
        "Dump files read",
        "Partial: cut off, and read again when it grows. Rejected: too large, of an unknown version, or more than plain"
        " data. Unreadable: not a dump, or no permission.",
        [(f"sum by (result) (increase(fr_exporter_dump_files_total{{{AT}}}[$__rate_interval]))", "{{result}}")],
        width=8,
        decimals=0,
        colors={"parsed": GREEN, "partial": YELLOW, "rejected": ORANGE, "unreadable": RED},
    )


def _bytes() -> Panel:
    return lines(
        "Dump bytes read",
        "How much the exporters read, each.",
        [(f"sum by (instance) (rate(fr_exporter_dump_bytes_total{{{AT}}}[$__rate_interval]))", "{{instance}}")],
        width=8,
        unit="Bps",
    )


def _last_analysis() -> Panel:
    analysed = (
        f"max by (cluster, namespace, training_job) (fr_exporter_last_analysis_timestamp_seconds{{{AT}, {OF_JOBS}}})"
    )
    return table(
        "Last analysis",
        "When the dumps of each job were last analysed. A job without dumps is not analysed.",
        [f"time() - {analysed}", f"{analysed} * 1000"],
        [
            Column("training_job", "Job"),
            Column("Value #A", "Ago", 110, unit="s", decimals=0),
            Column("Value #B", "At", 170, unit="dateTimeAsIso"),
        ],
        width=8,
        height=8,
        no_value="Nothing was analysed yet",
        sort=[("Ago", False)],
    )


def _published() -> Panel:
    return lines(
        "Attempts to publish",
        "Attempts of node exporters to put their records into the store. Failed: it did not answer; denied: it refused"
        " the credentials. Both are tried again. Dropped: the spool was full, and the oldest records were given up.",
        [(f"sum by (result) (increase(fr_exporter_publish_total{{{AT}}}[$__rate_interval]))", "{{result}}")],
        width=8,
        decimals=0,
        colors={"published": GREEN, "failed": ORANGE, "denied": YELLOW, "dropped": RED},
    )


def _spool() -> Panel:
    return lines(
        "Objects that wait to be published",
        "An object holds the records of one node. 0: the store has all; so it is where nothing is published.",
        [(f"max by (instance) (fr_exporter_publish_spool_files{{{AT}}})", "{{instance}}")],
        width=8,
        decimals=0,
    )


def _publish_delay() -> Panel:
    return _quantiles(
        "Dump to store",
        "From reading a node's newest dump to its record being in the store, over all exporters. Gaps: nothing was"
        " published.",
        "fr_exporter_publish_delay_seconds",
        no_value="Nothing was published in this time",
    )


def _quantiles(title: str, description: str, histogram: str, *, no_value: str) -> Panel:
    buckets = f"sum by (le) (rate({histogram}_bucket{{{AT}}}[$__rate_interval]))"
    return lines(
        title,
        description,
        [
            (f"histogram_quantile(0.5, {buckets}) >= 0", "p50"),
            (f"histogram_quantile(0.99, {buckets}) >= 0", "p99"),
        ],
        width=8,
        unit="s",
        colors={"p50": GREEN, "p99": ORANGE},
        points=True,
        no_value=no_value,
    )


def _memory() -> Panel:
    return lines(
        "Memory",
        "Resident memory of each exporter. limits.max_memory bounds it.",
        [(f"process_resident_memory_bytes{{{AT}}} {OF_EXPORTERS}", "{{instance}}")],
        width=6,
        unit="bytes",
    )


def _cpu() -> Panel:
    return lines(
        "CPU",
        "Cores that each exporter uses. 1 is one whole core.",
        [(f"rate(process_cpu_seconds_total{{{AT}}}[$__rate_interval]) {OF_EXPORTERS}", "{{instance}}")],
        width=6,
    )


def _open_files() -> Panel:
    return lines(
        "Open files",
        "File descriptors that each exporter holds.",
        [(f"process_open_fds{{{AT}}} {OF_EXPORTERS}", "{{instance}}")],
        width=6,
        decimals=0,
    )


def _dropped() -> Panel:
    return lines(
        "Series left out",
        "Series that limits.* keep from Prometheus, by metric. Above 0 the rank tables are not complete; suspects and"
        " waiters stay longest.",
        [(f"max by (instance, metric) (fr_exporter_series_dropped{{{AT}}}) > 0", "{{metric}} at {{instance}}")],
        width=6,
        decimals=0,
        no_value="Nothing is left out",
    )
