"""Every number, address and list of labels that the rules share: what stands as @{name} in rules/*.yaml.

Durations are PromQL durations; names that end in _s are seconds.
"""

from __future__ import annotations

_JOB = "cluster, namespace, training_job"
_GROUP = f"{_JOB}, process_group, process_group_desc"
_EXPORTER = "cluster, namespace, job, instance"

# Dumps older than this concern nobody any more; the default of incidents.ttl in the exporter's configuration.
_RECENT_S = 3600

# A verdict that was scraped once counts this long after its exporter is gone.
_MEMORY = "10m"

RULE_VALUES = {
    "memory": _MEMORY,
    "recent_s": str(_RECENT_S),
    # Dumps of one job further apart than this belong to different incidents: where each node has an exporter of its
    # own, only Prometheus sees them together.
    "same_incident_s": "600",
    # Ranks that wait on other nodes must do so this long: the exporters there may be about to tell.
    "node_wait": "1m",
    "unreadable_for": "1m",
    "down_for": "5m",
    "watch_down_for": "2m",
    "reload_failed_for": "5m",
    "series_dropped_for": "5m",
    # A store that is slow, or restarts, is no news.
    "publish_failing_for": "5m",
    # How long the alert stands after records were dropped.
    "publish_dropped_window": "15m",
    # An exporter that was up within this time is missed when it is not.
    "known": "1d",
    "analysis_failure_window": "15m",
    # An exporter that could not be scraped for less than this is known to have failed before.
    "analysis_failure_memory": "1h",
    # Half-written files fail to parse and are read again, so some failures are normal.
    "stage_failure_ratio": "0.5",
    "stage_failure_window": "5m",
    "stage_failing_for": "10m",
    "runbook": "https://github.com/fr-exporter/fr_exporter/blob/main/docs/runbook.md",
    "job": _JOB,
    "exporter": _EXPORTER,
    "group": _GROUP,
    "group_rank": f"{_GROUP}, rank, rank_node",
    # What an incident's verdict can change in.
    "verdict": "cause, attribution_state, suspects, suspect_nodes, process_group, process_group_desc, "
    "operation, seq_id",
    # Exporters whose newest dump is old. One whose dumps do not tell their time is not among them. Read from what was
    # scraped: what another group of rules records may come a moment later.
    "old": f"(max without (rank, rank_node) (last_over_time(fr_rank_dump_timestamp_seconds[{_MEMORY}])) "
    f"<= time() - {_RECENT_S})",
}
