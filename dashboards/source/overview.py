"""The dashboard of all jobs: what hangs now, and since when."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.source import queries
from dashboards.source.panels import (
    GREEN,
    JOB_LINK,
    ORANGE,
    ORANGE_FROM_1,
    OVERVIEW,
    RED,
    RED_FROM_1,
    VERDICTS,
    Column,
    Panel,
    bars,
    board,
    lines,
    stat,
    table,
    training_job,
    value_texts,
)
from dashboards.source.queries import GROUP, JOB, hung_jobs, open_incidents, present

SELECTED = 'training_job=~"$training_job"'
HUNG = hung_jobs(SELECTED)
LATEST = open_incidents(SELECTED)
RESTARTS = value_texts({"CONTINUE": ("without suspects", None), "STOP": ("no", None)})
SEEN_BY = value_texts({"job": ("whole job", None), "node": ("one node", None)})


def dashboard() -> Dashboard:
    """Return the hang overview."""
    return board(
        OVERVIEW,
        "Hang overview",
        "Which training jobs hang now, in which call, and which ranks they wait for.",
        variables=[training_job(several=True)],
        sections=[
            (None, [*_numbers(), _hung_now(), _jobs()]),
            ("History", [_over_time(), _by_cause()]),
            ("Behind, in jobs that hang", [_lagging_groups(), _laggards()]),
        ],
        incidents_of=SELECTED,
        hours=6,
    )


def _numbers() -> list[Panel]:
    return [
        stat(
            "Jobs hung",
            "Training jobs with an open incident, and jobs watched node by node whose ranks wait. 0 is good.",
            f"count(count by ({JOB}) ({HUNG})) or vector(0)",
            width=4,
            steps=((None, GREEN), (1, RED)),
        ),
        stat(
            "Inconclusive",
            "Training jobs whose ranks are stuck while the dumps do not tell why. The exporter's page says more.",
            f"count({queries.verdict(SELECTED)} == 3) or vector(0)",
            width=3,
            steps=ORANGE_FROM_1,
        ),
        stat(
            "Jobs watched",
            "Training jobs that an exporter watches, with or without dumps.",
            f"count(count by ({JOB}) ({present('fr_verdict', SELECTED)})) or vector(0)",
            width=3,
        ),
        stat(
            "Suspect ranks",
            "Ranks that made others wait, in the jobs that hang now.",
            f"sum({queries.suspect_count(SELECTED)}) or vector(0)",
            width=4,
            steps=RED_FROM_1,
        ),
        stat(
            "Waiting ranks",
            "Ranks stuck in a call, in the jobs that hang now. Most of them are victims.",
            f"sum({queries.waiting_ranks(SELECTED)} and on ({JOB}) {HUNG}) or vector(0)",
            width=4,
            steps=ORANGE_FROM_1,
        ),
        stat(
            "Incidents, 24 hours",
            "Different incidents that were open within the last 24 hours.",
            f"count(count by ({JOB}, incident) (last_over_time({LATEST}[24h]))) or vector(0)",
            width=3,
        ),
        stat(
            "Exporters down",
            "Exporters that answered within the last day and do not now. They are blind to hangs.",
            f"count({queries.exporters()} == 0) or vector(0)",
            width=3,
            steps=((None, GREEN), (1, ORANGE)),
        ),
    ]


def _hung_now() -> Panel:
    labels = (
        f"{JOB}, scope, cause, attribution_state, process_group, process_group_desc, operation, seq_id, suspects,"
        " suspect_nodes"
    )
    info = f"max by ({labels}) ({LATEST})"
    unexplained = f"({HUNG} unless on ({JOB}) {LATEST})"
    start = f"min by ({JOB}, scope) ({present('fr_hang_start_timestamp_seconds', SELECTED)})"
    since = f"({info} * 0 + on ({JOB}, scope) group_left () {start})"
    return table(
        "Hung now",
        "One row for each open incident, the longest first; dashes where ranks wait and no exporter knows why. Click a"
        " job for its ranks and evidence. Suspects are the ranks that the others wait for. An incident stays here for"
        " 10 minutes after its exporter is gone.",
        [f"{info} or {unexplained}", f"time() - {since}"],
        [
            Column("training_job", "Job", 140, link=JOB_LINK),
            Column("Value #B", "Hung for", 80, unit="s", decimals=0),
            Column("suspects", "Suspect ranks", 120),
            Column("suspect_nodes", "On nodes", 150),
            Column("cause", "Cause", 160),
            Column("operation", "Operation", 270),
            Column("seq_id", "Seq. ID", 70),
            Column("process_group", "Group", 60),
            Column("process_group_desc", "Group description"),
            Column("attribution_state", "Restart helps", 140, texts=RESTARTS),
            Column("scope", "Seen by", 90, texts=SEEN_BY),
        ],
        width=24,
        height=8,
        no_value="No hang",
        sort=[("Hung for", True)],
    )


def _jobs() -> Panel:
    scopes = f"max by ({JOB}, scope) ({present('fr_verdict', SELECTED)} ^ 0)"
    dumped_at = f"(training_job:fr_rank_dump_timestamp_seconds:max{{{SELECTED}}} * on ({JOB}) group_right () {scopes})"
    return table(
        "All jobs",
        "Every job that is watched, what its dumps say, and how many ranks dumped of how many. A job that runs well has"
        " no dumps: ranks dump when the watchdog times out, or when they are asked.",
        [
            queries.verdict(SELECTED),
            queries.dumped_ranks(SELECTED),
            queries.expected_ranks(SELECTED),
            queries.waiting_ranks(SELECTED),
            f"time() - {dumped_at}",
        ],
        [
            Column("training_job", "Job", link=JOB_LINK),
            Column("Value #A", "Verdict", 170, unit="none", texts=VERDICTS),
            Column("Value #B", "Ranks dumped", unit="none"),
            Column("Value #C", "Ranks expected", unit="none"),
            Column("Value #D", "Ranks waiting", unit="none"),
            Column("Value #E", "Newest dump, ago", unit="s", decimals=0),
            Column("scope", "An exporter sees", texts=SEEN_BY),
        ],
        width=24,
        height=9,
        no_value="No exporter watches a job",
        sort=[("Verdict", True)],
    )


def _over_time() -> Panel:
    return lines(
        "Jobs hung over time",
        "Which job was hung when: a layer for each, as long as its incident was open. Red marks are incidents too.",
        [(f"max by (training_job) ({HUNG}) ^ 0", "{{training_job}}")],
        width=16,
        height=9,
        decimals=0,
        stacked=True,
        no_value="No hang in this time",
    )


def _by_cause() -> Panel:
    return bars(
        "Incidents by cause",
        "Different incidents that were open in the time range, by what the dumps show. The runbook says what to do"
        " about each cause.",
        [
            (
                f"sort_desc(count by (cause) (count by ({JOB}, incident, cause) (last_over_time({LATEST}[$__range]))))",
                "{{cause}}",
                ((None, ORANGE),),
            )
        ],
        width=8,
        height=9,
        no_value="No hang in this time",
    )


def _lagging_groups() -> Panel:
    return table(
        "Process groups that lag",
        "Calls by which the last rank of a group is behind its first, over all exporters. Ranks dump at slightly"
        " different moments, so that a few calls are normal. For jobs whose exporters each see one node only, this and"
        " the next table show what no exporter sees alone. Collectives only.",
        queries.group_lags(SELECTED),
        [
            Column("training_job", "Job", 150, link=JOB_LINK),
            Column("process_group", "Group", 70),
            Column("process_group_desc", "Group description"),
            Column("Value #A", "Not issued", 100, unit="none"),
            Column("Value #B", "Not completed", 120, unit="none"),
        ],
        width=12,
        height=9,
        no_value="No job hangs, or no group lags",
        sort=[("Not completed", True), ("Not issued", True)],
    )


def _laggards() -> Panel:
    laggards = f"process_group_rank:fr_rank_last_enqueued_seq_id:laggard{{{SELECTED}}}"
    return table(
        "Ranks that are waited for",
        "Ranks that have nothing to do and did not issue the call that their group waits in: their host stopped. Over"
        " all exporters, so that it also holds where each sees one node. A device that stopped does not show here.",
        [f"topk(50, max by ({GROUP}, rank, rank_node) ({laggards}) and on ({JOB}) {HUNG})"],
        [
            Column("training_job", "Job", 150, link=JOB_LINK),
            Column("rank", "Rank", 70),
            Column("rank_node", "Node", 130),
            Column("process_group", "Group", 70),
            Column("process_group_desc", "Group description"),
            Column("Value", "Calls missing", 110, unit="none"),
        ],
        width=12,
        height=9,
        no_value="No rank is waited for",
        sort=[("Job", False)],
    )
