"""The dashboard of one job: what it hangs in, who made it wait, and on what evidence."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.source import queries
from dashboards.source.panels import (
    BLUE,
    GREEN,
    INCIDENT,
    ORANGE,
    PLAIN,
    RED,
    VERDICTS,
    YELLOW,
    Column,
    Panel,
    Steps,
    any_text,
    bars,
    board,
    lines,
    stat,
    table,
    training_job,
    value_texts,
)
from dashboards.source.queries import GROUP, JOB, MEMORY, NODES, last_shown, open_incidents, present

SELECTED = 'training_job="$training_job"'
LATEST = open_incidents(SELECTED)
HUNG_SINCE = f"min({present('fr_hang_start_timestamp_seconds', SELECTED)} and on ({JOB}) {LATEST})"
UNDECIDED = queries.undecided(SELECTED)
SUSPECT = queries.suspects(SELECTED)

# Where each exporter sees one node, groups that wait for a rank of another node are known to the recording rules only.
HUNG_GROUPS = f"""(
  max by ({GROUP}) ({last_shown("fr_hung_process_group", SELECTED)})
  or
  max by ({GROUP}) (process_group_rank:fr_rank_last_enqueued_seq_id:laggard{{{SELECTED}}})
    and on ({JOB}) (max by ({JOB}) ({present("fr_waiting_ranks", SELECTED, NODES)}) > 0)
)"""

CONFIDENCES = value_texts({"high": ("high", RED), "medium": ("medium", ORANGE), "low": ("low", YELLOW)})
BEHIND: Steps = ((None, "transparent"), (1, "dark-orange"))
HEALTH = value_texts({"1": ("healthy", GREEN), "0": ("failed", RED)})


def dashboard() -> Dashboard:
    """Return the dashboard of one job's incident."""
    return board(
        INCIDENT,
        "Hang incident",
        "One training job: what it hangs in, which ranks made the others wait, and on what evidence.",
        variables=[training_job(several=False)],
        sections=[
            (None, [*_verdict(), *_call(), _suspects(), _hung_groups()]),
            (
                "How far ranks are behind in the hung groups",
                [_behind("enqueued", "issued"), _behind("completed", "completed")],
            ),
            ("Ranks", [_dumps(), _mismatches(), _failed_health(), _ranks()]),
            ("Over time, and in all process groups", [_waiting_over_time(), _dumps_over_time(), _lag_of_groups()]),
        ],
        incidents_of=SELECTED,
        hours=1,
    )


def _verdict() -> list[Panel]:
    can_restart = open_incidents(SELECTED, 'attribution_state="CONTINUE"')
    cannot = open_incidents(SELECTED, 'attribution_state="STOP"')
    return [
        stat(
            "Verdict",
            "What the dumps of this job say. Inconclusive: ranks are stuck, and the dumps do not tell why. A job that"
            " runs well has no dumps.",
            f"max({queries.verdict(SELECTED)})",
            width=4,
            texts=VERDICTS,
            no_value="Not watched",
        ),
        stat(
            "Suspect ranks",
            "The ranks that the others wait for.",
            _known(LATEST, "suspects"),
            label="suspects",
            width=5,
            texts=any_text(RED),
            no_value="No hang",
        ),
        stat(
            "Cause",
            "What the dumps show of the suspects in the hung call; where faults differ, each has its own below. The"
            " runbook says what each cause means and where to look.",
            _known(LATEST, "cause"),
            label="cause",
            width=5,
            no_value="No hang",
        ),
        stat(
            "Restart",
            "After isolating suspects: a restart without the suspects can help. Does not help: it would meet the same"
            " fault, or there is nobody to isolate.",
            f"max({can_restart} ^ 0 or {cannot} ^ 0 * 2 or {UNDECIDED} ^ 0 * 3)",
            width=6,
            texts=value_texts(
                {"1": ("After isolating suspects", BLUE), "2": ("Does not help", ORANGE), "3": ("Not known", None)}
            ),
            no_value="No hang",
        ),
        stat(
            "Hung for",
            "Time since the oldest waiter issued the call that does not end.",
            f"time() - {HUNG_SINCE}",
            width=4,
            unit="s",
            decimals=1,
            no_value="-",
        ),
    ]


def _known(verdict: str, label: str) -> str:
    """Return PromQL for an open incident's label: `Not known` where it is empty, or where only waiting is seen."""
    return f'label_replace({verdict} or {UNDECIDED}, "{label}", "Not known", "{label}", "")'


def _call() -> list[Panel]:
    in_group = f'label_replace({LATEST}, "in", "in group", "", "")'
    call = f'label_join({in_group}, "call", " ", "operation", "seq_id", "in", "process_group", "process_group_desc")'
    return [
        stat(
            "Hung call",
            "The call to look at first: its operation, sequence ID and process group. Other groups may hang with it.",
            _known(call, "call"),
            label="call",
            width=14,
            no_value="No hang",
        ),
        stat(
            "Suspect nodes",
            "The nodes of the suspect ranks, where the dumps or the exporter's configuration tell them.",
            _known(LATEST, "suspect_nodes"),
            label="suspect_nodes",
            width=6,
            no_value="No hang",
        ),
        stat(
            "Since",
            "When the oldest waiter issued the call that does not end.",
            f"{HUNG_SINCE} * 1000",
            width=4,
            unit="dateTimeAsIso",
            decimals=None,
            no_value="-",
        ),
    ]


def _suspects() -> Panel:
    every = queries.suspects(SELECTED, "rank_node", "cause", "confidence")

    def health(device: str) -> str:
        checked = f'last_over_time(fr_rank_health{{{SELECTED}, device="{device}"}}[{MEMORY}])'
        return f"{every} * on ({JOB}, rank) group_left () max by ({JOB}, rank) ({checked})"

    return table(
        "Suspects",
        "Who made the others wait. The confidence is fixed by the kind of evidence. High: others went on past what this"
        " rank is stuck in, or it has nothing to do and others wait. Medium: the order of calls or start times tell."
        " Low: the dumps narrow it down no further. GPU and NIC are the health checks in the dump, where it has them.",
        [every, health("gpu"), health("nic")],
        [
            Column("rank", "Rank", 70),
            Column("rank_node", "Node", 130),
            Column("cause", "Cause"),
            Column("confidence", "Confidence", 110, texts=CONFIDENCES),
            Column("Value #B", "GPU", 80, unit="none", texts=HEALTH),
            Column("Value #C", "NIC", 80, unit="none", texts=HEALTH),
        ],
        width=10,
        height=8,
        no_value="No suspect is named",
        sort=[("Confidence", False)],
    )


def _hung_groups() -> Panel:
    calls = f"max by ({GROUP}, operation, cause) ({last_shown('fr_hung_process_group', SELECTED)})"
    seq_ids = f"max by ({GROUP}) ({last_shown('fr_hung_collective_seq_id', SELECTED)})"
    return table(
        "Hung process groups",
        "The calls in which ranks wait directly on a suspect. Look first at the one that is also the hung call above.",
        [f"{calls} * on ({GROUP}) group_left () {seq_ids}", f"{calls} and on ({GROUP}) {LATEST}"],
        [
            Column("Value #B", "Look", 70, unit="none", texts=value_texts({"1": ("first", RED)})),
            Column("process_group", "Group", 70),
            Column("process_group_desc", "Group description"),
            Column("operation", "Operation", 260),
            Column("Value #A", "Seq. ID", 80, unit="none"),
            Column("cause", "Cause", 150),
        ],
        width=14,
        height=8,
        no_value="No hung process group is known",
        sort=[("Look", True)],
    )


def _behind(counter: str, done: str) -> Panel:
    lag = _lag(counter)
    return bars(
        f"Calls not {done}",
        f"Calls that a rank has not {done} and the furthest rank of the same hung group has. Suspects come first, in"
        " red, then the others that are furthest behind; at most 12 each. A rank without a dump is not among them."
        " Collectives only: the counters of send and recv do not compare between ranks.",
        [
            (
                f"topk(12, {lag} and on ({JOB}, rank) {SUSPECT})",
                "suspect {{rank}} · group {{process_group}}",
                ((None, PLAIN), (1, RED)),
            ),
            (
                f"topk(12, {lag} unless on ({JOB}, rank) {SUSPECT})",
                "rank {{rank}} · group {{process_group}}",
                ((None, PLAIN), (1, BLUE)),
            ),
        ],
        width=12,
        height=13,
        no_value="No hung collective is known",
    )


def _lag(counter: str) -> str:
    """Return PromQL for the calls by which each rank of the hung groups is behind the furthest of its group."""
    metric = f"fr_rank_last_{counter}_seq_id"
    return f"""(
  process_group:{metric}:max{{{SELECTED}}}
    - on ({GROUP}) group_right ()
  {_of_hung_groups(f"process_group_rank:{metric}:max")}
)"""


def _of_hung_groups(metric: str) -> str:
    return f"max by ({GROUP}, rank, rank_node) ({metric}{{{SELECTED}}} and on ({GROUP}) {HUNG_GROUPS})"


def _ranks() -> Panel:
    issued, completed = _lag("enqueued"), _lag("completed")
    # Suspects come first, whatever their lag.
    shown = f"topk(100, ({issued} and on ({JOB}, rank) {SUSPECT}) + 1e9 or {issued})"
    return table(
        "Ranks of the hung groups",
        "Where each rank stands in each hung group: at most 100 rows, suspects first, then those furthest behind. Calls"
        " behind are counted from the furthest rank of the group. Collectives only.",
        [
            f"{shown} * 0 + on ({JOB}, rank) group_left () {SUSPECT}",
            f"{_of_hung_groups('process_group_rank:fr_rank_last_enqueued_seq_id:max')} and {shown}",
            f"{_of_hung_groups('process_group_rank:fr_rank_last_completed_seq_id:max')} and {shown}",
            f"{issued} and {shown}",
            f"{completed} and {shown}",
        ],
        [
            Column("rank", "Rank", 60),
            Column("Value #A", "Suspect", 80, unit="none", texts=value_texts({"1": ("suspect", RED)})),
            Column("rank_node", "Node", 120),
            Column("process_group", "Group", 70),
            Column("process_group_desc", "Group description"),
            Column("Value #B", "Last issued", 100, unit="none"),
            Column("Value #C", "Last completed", 120, unit="none"),
            Column("Value #D", "Not issued", 100, unit="none", steps=BEHIND),
            Column("Value #E", "Not completed", 120, unit="none", steps=BEHIND),
        ],
        width=24,
        height=10,
        no_value="No hung collective is known",
        sort=[("Suspect", True), ("Not completed", True), ("Not issued", True)],
    )


def _in_state(state: str) -> str:
    """Return PromQL for the ranks in a state; where each exporter sees one node, of the node that has most."""
    ranks = present("fr_dump_set_ranks", SELECTED, f'state="{state}"')
    return f"max({ranks})"


def _rank_states() -> list[tuple[str, str]]:
    dumped = f"max({queries.dumped_ranks(SELECTED)})"
    return [(dumped, "dumped"), *((_in_state(state), state) for state in ("pending", "missing", "stale", "unreadable"))]


STATE_COLORS = {"dumped": GREEN, "pending": BLUE, "missing": RED, "stale": ORANGE, "unreadable": ORANGE}


def _dumps() -> Panel:
    return bars(
        "Ranks by dump",
        "Pending: may still write. Missing: wrote no dump in time; the process or node may be gone. Stale: the file is"
        " of an earlier incident. Unreadable: cut, damaged or refused. Where each exporter sees one node, the last four"
        " are those of the worst node.",
        [(expr, state, ((None, PLAIN), (1, STATE_COLORS[state]))) for expr, state in _rank_states()],
        width=8,
        height=6,
        no_value="No dumps",
    )


def _mismatches() -> Panel:
    return table(
        "Calls that differ between ranks",
        "Open collectives whose operation, size or dtype is not the same on all ranks, by process group. Such a call"
        " never ends.",
        [f"max by ({GROUP}, kind) ({last_shown('fr_collective_mismatches', SELECTED)}) > 0"],
        [
            Column("process_group", "Group", 70),
            Column("process_group_desc", "Group description"),
            Column("kind", "What differs", 110),
            Column("Value", "Calls", 70, unit="none"),
        ],
        width=8,
        height=6,
        no_value="All open calls are the same on all ranks",
    )


def _failed_health() -> Panel:
    return table(
        "Failed health checks",
        "Ranks whose dump says that the GPU or the NIC failed its check, suspect or not. Most jobs do not check.",
        [f"max by ({JOB}, rank, rank_node, device) (last_over_time(fr_rank_health{{{SELECTED}}}[{MEMORY}])) == 0"],
        [
            Column("rank", "Rank", 70),
            Column("rank_node", "Node"),
            Column("device", "Device"),
        ],
        width=8,
        height=6,
        no_value="No dump holds a failed health check",
    )


def _waiting_over_time() -> Panel:
    return lines(
        "Waiting and suspect ranks",
        "Ranks that are stuck in a call, and those that made them wait.",
        [
            (f"max({queries.waiting_ranks(SELECTED)})", "waiting"),
            (f"max({queries.suspect_count(SELECTED)}) or vector(0)", "suspect"),
        ],
        width=7,
        height=9,
        decimals=0,
        colors={"waiting": ORANGE, "suspect": RED},
        no_value="Not watched",
    )


def _dumps_over_time() -> Panel:
    return lines(
        "Ranks by dump, over time",
        "How the dumps arrived. In a hang most ranks dump within seconds of each other.",
        [(f"{expr} or vector(0)", state) for expr, state in _rank_states()],
        width=7,
        height=9,
        decimals=0,
        colors=STATE_COLORS,
    )


def _lag_of_groups() -> Panel:
    return table(
        "Process groups that lag",
        "While the job hangs: calls by which the last rank of a group is behind its first, over all exporters; at most"
        " 50 groups. Ranks dump at slightly different moments, so that a few calls are normal. Collectives only.",
        queries.group_lags(SELECTED),
        [
            Column("process_group", "Group", 70),
            Column("process_group_desc", "Group description"),
            Column("Value #A", "Not issued", 100, unit="none"),
            Column("Value #B", "Not completed", 120, unit="none"),
        ],
        width=10,
        height=9,
        no_value="No hang, or no group lags",
        sort=[("Not completed", True), ("Not issued", True)],
    )
