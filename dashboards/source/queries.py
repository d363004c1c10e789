"""PromQL that more than one dashboard asks, as functions of a selector of jobs.

Several exporters may see one directory, so that values are aggregated with `max`, never with `sum`. Where each exporter
sees one node (scope `node`), ranks are counted once over all of them.
"""

from __future__ import annotations

from dashboards.source.thresholds import RULE_VALUES

JOB = RULE_VALUES["job"]
GROUP = RULE_VALUES["group"]
MEMORY = RULE_VALUES["memory"]
KNOWN = RULE_VALUES["known"]
RECENT_S = RULE_VALUES["recent_s"]
EXPORTER = RULE_VALUES["exporter"]

# Finer than scrapes usually are, and coarse enough for a query of a panel.
STEP = "5s"

# An exporter's jobs: what all of its series about one of them have in common.
SOURCE = f"{EXPORTER}, training_job, scope"

WHOLE = 'scope="job"'
NODES = 'scope="node"'


def present(metric: str, jobs: str, *matchers: str) -> str:
    """Return PromQL for a gauge, and for what exporters which are gone showed last of it.

    A sidecar leaves with its job, and then the dashboards are needed most. Not for metrics of ranks: it takes too long.
    """
    series = _series(metric, jobs, *matchers)
    return f"({series} or last_over_time({series}[{MEMORY}]) unless on ({SOURCE}) fr_hang{{{jobs}}})"


def last_shown(metric: str, jobs: str) -> str:
    """Return what `present` does, for a metric whose labels say what is so: only those of an exporter's last scrape."""
    series = _series(metric, jobs)
    return f"""(
  {series}
  or
  last_over_time({series}[{MEMORY}])
    and max_over_time(timestamp({series})[{MEMORY}:{STEP}])
      >= on ({SOURCE}) group_left ()
    max_over_time(timestamp(fr_hang{{{jobs}}})[{MEMORY}:{STEP}])
    unless on ({SOURCE}) fr_hang{{{jobs}}}
)"""


def _series(metric: str, *matchers: str) -> str:
    return f"{metric}{{{', '.join(matchers)}}}" if matchers else metric


def exporters(*matchers: str) -> str:
    """Return PromQL for `up` of the exporters that answered within the last day."""
    known = f"max_over_time({_series('fr_exporter_build_info', *matchers)}[{KNOWN}])"
    return f"({_series('up', *matchers)} and on ({EXPORTER}) {known})"


def group_lags(jobs: str) -> list[str]:
    """Return PromQL for the calls by which groups of jobs that hang lag: those not issued, and those not completed."""
    return [
        f"topk(50, max by ({GROUP}) (process_group:fr_rank_last_{counter}_seq_id:lag{{{jobs}}})"
        f" and on ({JOB}) {hung_jobs(jobs)})"
        for counter in ("enqueued", "completed")
    ]


def open_incidents(*matchers: str) -> str:
    """Return PromQL with the latest verdict of each open incident in its labels."""
    return f"incident:fr_incident_info:latest{{{', '.join(matchers)}}}"


def hung_jobs(jobs: str) -> str:
    """Return PromQL with one series for each job that hangs, by `scope`.

    Where each exporter sees one node, none may know the suspects: ranks that wait tell, while their dumps are recent.
    """
    return f"""(
  max by ({JOB}, scope) ({present("fr_hang", jobs)}) == 1
  or
  max by ({JOB}, scope) ({present("fr_waiting_ranks", jobs, NODES)}) > 0
    and on ({JOB}) (training_job:fr_rank_dump_timestamp_seconds:max{{{jobs}}} > time() - {RECENT_S})
    unless on ({JOB}) {_known(jobs)}
)"""


def _known(jobs: str) -> str:
    """Return PromQL with one series for each job whose exporters that see the whole of it count, and others do not."""
    return f"training_job:fr_hang:known{{{jobs}}}"


def verdict(jobs: str) -> str:
    """Return PromQL for the verdict of each job by `scope`, as a number that `panels.VERDICTS` names."""
    return f"""(
  {hung_jobs(jobs)} * 0 + 4
  or
  max by ({JOB}, scope) (
    {present("fr_verdict", jobs, 'verdict="hang"')} * 2
    or {present("fr_verdict", jobs, 'verdict="inconclusive"')} * 3
    or {present("fr_verdict", jobs, 'verdict="healthy"')}
  )
)"""


def undecided(jobs: str) -> str:
    """Return PromQL with one series for each job whose ranks are stuck without an incident that says why."""
    return f"({verdict(jobs)} > 2 unless on ({JOB}) {open_incidents(jobs)})"


def dumped_ranks(jobs: str) -> str:
    """Return PromQL for the number of ranks that dumped, of each job by `scope`."""
    return f"""(
  max by ({JOB}, scope) ({present("fr_dump_set_ranks", jobs, WHOLE, 'state="dumped"')})
  or
  (count by ({JOB}) (rank:fr_rank_dump_timestamp_seconds:max{{{jobs}}}) * on ({JOB}) group_right ()
    max by ({JOB}, scope) ({present("fr_verdict", jobs, NODES)} ^ 0))
)"""


def expected_ranks(jobs: str) -> str:
    """Return PromQL for the number of ranks of each job by `scope`."""
    return f"""(
  max by ({JOB}, scope) ({present("fr_dump_set_expected_ranks", jobs, WHOLE)})
  or
  max by ({JOB}, scope) (
    {present("fr_dump_set_expected_ranks", jobs, NODES)}
      + ignoring (state)
    {present("fr_dump_set_ranks", jobs, NODES, 'state="remote"')}
  )
)"""


def waiting_ranks(jobs: str) -> str:
    """Return PromQL for the number of ranks that are stuck in a call, of each job by `scope`."""
    return f"""(
  max by ({JOB}, scope) ({present("fr_waiting_ranks", jobs, WHOLE)})
  or
  training_job:fr_rank_open_operations:count{{{jobs}}}
    * on ({JOB}) group_right ()
  (max by ({JOB}, scope) ({present("fr_waiting_ranks", jobs, NODES)}) > bool 0)
)"""


def suspects(jobs: str, *labels: str) -> str:
    """Return PromQL with one series for each suspect rank of the jobs that hang, with these labels of it."""
    by = ", ".join((JOB, "rank", *labels))
    of_nodes = f'label_replace({_known(jobs)}, "scope", "node", "", "")'
    shown = f"{last_shown('fr_suspect_rank', jobs)} unless on ({JOB}, scope) {of_nodes}"
    return f"(max by ({by}) ({shown}) and on ({JOB}) {hung_jobs(jobs)})"


def suspect_count(jobs: str) -> str:
    """Return PromQL for the number of suspect ranks of each job that hangs, also beyond those with a series."""
    return f"""(
  (
    sum by ({JOB}) (max by ({JOB}, cause) ({present("fr_suspect_ranks", jobs, WHOLE)})) and on ({JOB}) {_known(jobs)}
    or
    count by ({JOB}) (max by ({JOB}, rank) ({last_shown("fr_suspect_rank", f"{jobs}, {NODES}")}))
  )
  and on ({JOB}) {hung_jobs(jobs)}
)"""
