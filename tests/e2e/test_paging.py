"""From a dump that lands to the page: real exporter, Prometheus, Alertmanager and webhook, at a 2 s scrape interval."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any, TypeAlias

import pytest
import yaml

from fr_exporter.metrics.catalog import CATALOG
from tests.e2e.exporter import Config, Exporter, serving, wait_until
from tests.e2e.paging import DASHBOARDS, RULES, Notification, Paging, Prometheus, paging
from tests.promql import metric_names

pytestmark = pytest.mark.e2e

Tool: TypeAlias = Callable[[str], str]
Page: TypeAlias = Callable[..., AbstractContextManager[Paging]]

JOB = "drill"
HANG_EVALUATIONS = 'count_over_time(ALERTS{alertname="FRHang",alertstate="firing"}[5m])'

# What Grafana puts in place of its own variables.
GRAFANA = {"__range": "15m", "__rate_interval": "1m", "__interval": "10s"}
# What may be empty while one host stalls, by the reason.
EMPTY = {
    "what they warn of did not happen": {
        "FRHang critical node",
        "FRCollectiveMismatch warning",
        "FRRankDumpMissing warning",
        "FRSuspectNodeUnhealthy warning",
        "FRInconclusive warning",
        "FRDumpUnreadable warning",
        "FRExporterDown warning",
        "FRExporterWatchDown warning",
        "FRExporterPublishFailing warning",
        "FRExporterPublishFailing warning dropped",
        "FRExporterStageFailing critical",
        "FRExporterStageFailing warning",
        "FRExporterConfigReloadFailed warning",
        "FRExporterSeriesDropped warning",
    },
    "every rank completed what any rank did": {
        "process_group_rank:fr_rank_last_completed_seq_id:lag",
        "process_group:fr_rank_last_completed_seq_id:lag",
        "hang-overview: table Process groups that lag B",
        "incident: table Process groups that lag B",
    },
    "the drill's dumps have no health checks": {
        "incident: table Failed health checks A",
        "incident: table Suspects B",
        "incident: table Suspects C",
    },
    "its calls are the same on all ranks": {"incident: table Calls that differ between ranks A"},
    "nothing is published": {"exporter: timeseries Dump to store A", "exporter: timeseries Dump to store B"},
    "no series was left out": {"exporter: timeseries Series left out A"},
}


@pytest.fixture
def page(tmp_path: Path, prometheus_tool: Tool) -> Page:
    """Return what runs Prometheus, Alertmanager and a webhook for exporters at the given addresses."""

    def run(*exporters: str, **options: str) -> AbstractContextManager[Paging]:
        return paging(tmp_path, prometheus_tool, exporters, **options)

    return run


def watching(dumps: Path, listen: str = "127.0.0.1:0") -> Config:
    """Return the configuration of one job, with the default times."""
    return {"targets": [{"training_job": JOB, "path": str(dumps)}], "web": {"listen": listen}}


def drill(dumps: Path) -> dict[str, Any]:
    """Let the simulator drop a hang of 16 ranks file by file, in which the host of rank 9 stalls; return the truth."""
    command = [sys.executable, "-m", "fr_exporter", "simulate", str(dumps), "--world-size", "16"]
    options = ["--fault", "host_stall:9", "--write-delay", "0.1"]
    subprocess.run([*command, *options], stdout=subprocess.DEVNULL, timeout=30, check=True)
    truth: dict[str, Any] = json.loads((dumps / "truth.json").read_text())
    return truth


def remove(dumps: Path) -> None:
    """Clear a job's dumps away, as who restarts it may do."""
    for file in dumps.iterdir():
        file.unlink()


def hang_in(notification: Notification) -> dict[str, Any]:
    """Return the one FRHang that a notification is about."""
    [alert] = [alert for alert in notification.body["alerts"] if alert["labels"]["alertname"] == "FRHang"]
    found: dict[str, Any] = alert
    return found


def assert_names(alert: dict[str, Any], truth: dict[str, Any]) -> None:
    """Assert that an alert names the ranks of the truth and nobody else, a cause and a call that are right."""
    lines = alert["annotations"]["description"].splitlines()
    suspects = ",".join(str(rank) for rank in truth["required"])
    assert f"Suspects: {'rank' if len(truth['required']) == 1 else 'ranks'} {suspects}" in lines
    assert alert["labels"]["cause"] in truth["causes"]
    assert alert["labels"]["training_job"] == JOB
    calls = [
        f"Hung: process group {call['process_group']} {call['desc']}, {call['operation']}"
        f" at sequence ID {call['seq_id']}"
        for call in truth["hung"]
    ]
    assert set(calls) & set(lines), (calls, lines)


def test_the_page_comes_within_ten_seconds_and_its_end_is_told(
    tmp_path: Path, dumps: Path, page: Page, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page names the rank at fault and nobody else; when the dumps are gone the same incident is resolved."""
    with serving(tmp_path, watching(dumps)) as exporter, page(exporter.address) as path:
        truth = drill(dumps)
        wait_until(lambda: path.pager.of("FRHang"))
        [told] = path.pager.of("FRHang")
        took_s = told.received_s - max(file.stat().st_mtime for file in dumps.glob("_dump_*"))
        with capsys.disabled():
            print(f"\nlast dump file written -> page received: {took_s:.1f} s at 2 s intervals")

        assert truth["required"] == [9]
        assert_names(hang_in(told), truth)
        assert took_s <= 10

        remove(dumps)
        wait_until(lambda: path.pager.of("FRHang", "resolved"))
        incident = hang_in(told)["labels"]["incident"]
        assert path.pager.story("FRHang") == [("firing", incident), ("resolved", incident)]


def test_the_page_comes_although_the_exporter_is_gone(tmp_path: Path, dumps: Path, page: Page) -> None:
    """One scrape of the verdict is enough, and no rule need have looked at it while the exporter was there."""
    with serving(tmp_path, watching(dumps)) as exporter, page(exporter.address, evaluation_interval="15s") as path:
        wait_for_evaluation(path.prometheus)
        truth = drill(dumps)
        wait_until(lambda: path.prometheus.values("fr_incident_info"))
        exporter.process.kill()
        assert path.pager.received == []

        wait_until(lambda: path.pager.of("FRHang"))
        alert = hang_in(path.pager.of("FRHang")[0])
        assert path.prometheus.values("fr_incident_info", time=alert["startsAt"]) == []
        assert path.prometheus.values("count_over_time(fr_incident_info[5m])") == [1]
        assert_names(alert, truth)


def wait_for_evaluation(prometheus: Prometheus) -> None:
    """Return just after the rule of FRHang was evaluated."""

    def evaluated() -> str:
        return next(str(rule["lastEvaluation"]) for rule in prometheus.rules() if rule["name"] == "FRHang")

    before = evaluated()
    wait_until(lambda: evaluated() != before)


@pytest.mark.parametrize("number", [1, 3])
def test_restarts_in_mid_incident_page_nobody_again(tmp_path: Path, dumps: Path, page: Page, number: int) -> None:
    """However many exporters watch a directory, and though all are killed and started again: one page, one resolve."""
    with ExitStack() as stack:

        def start(listen: str) -> Exporter:
            directory = Path(tempfile.mkdtemp(dir=tmp_path))
            return stack.enter_context(serving(directory, watching(dumps, listen)))

        exporters = [start("127.0.0.1:0") for _ in range(number)]
        path = stack.enter_context(page(*(exporter.address for exporter in exporters)))
        drill(dumps)
        wait_until(lambda: path.pager.of("FRHang"))
        for exporter in exporters:
            exporter.process.kill()
            exporter.process.wait()
        wait_until(lambda: path.prometheus.values("up") == [0] * number)
        for exporter in exporters:
            start(exporter.address)
        wait_until(lambda: path.prometheus.values("fr_incident_info") == [1] * number)
        [evaluations] = path.prometheus.values(HANG_EVALUATIONS)
        wait_until(lambda: path.prometheus.values(HANG_EVALUATIONS) >= [evaluations + 3])

        remove(dumps)
        wait_until(lambda: path.pager.of("FRHang", "resolved"))
        incident = hang_in(path.pager.of("FRHang")[0])["labels"]["incident"]
        assert path.pager.story("FRHang") == [("firing", incident), ("resolved", incident)]


def test_a_restart_before_the_directory_is_mounted_pages_nobody_again(tmp_path: Path, dumps: Path, page: Page) -> None:
    """An exporter that has not seen the dumps yet does not say that the hang is over."""
    with ExitStack() as stack:
        (tmp_path / "again").mkdir()
        exporter = stack.enter_context(serving(tmp_path, watching(dumps)))
        path = stack.enter_context(page(exporter.address))
        drill(dumps)
        wait_until(lambda: path.pager.of("FRHang"))
        exporter.process.kill()
        exporter.process.wait()
        away = dumps.rename(tmp_path / "unmounted")
        stack.enter_context(serving(tmp_path / "again", watching(dumps, exporter.address)))
        wait_until(lambda: path.prometheus.values("fr_exporter_watch_up") == [0])
        [evaluations] = path.prometheus.values(HANG_EVALUATIONS)
        wait_until(lambda: path.prometheus.values(HANG_EVALUATIONS) >= [evaluations + 3])
        away.rename(dumps)
        wait_until(lambda: path.prometheus.values("fr_incident_info") == [1])
        incident = hang_in(path.pager.of("FRHang")[0])["labels"]["incident"]
        assert path.pager.story("FRHang") == [("firing", incident)]


@dataclass(frozen=True, slots=True)
class Query:
    """An expression that a panel, an annotation or a rule evaluates, now or over time, and where it stands."""

    where: str
    expr: str
    instant: bool = True


def panel_queries() -> Iterator[Query]:
    """Return every query of every dashboard, those of annotations too."""
    for file in sorted(DASHBOARDS.glob("*.json")):
        dashboard = json.loads(file.read_text(encoding="utf-8"))
        for annotation in dashboard["annotations"]["list"]:
            yield Query(f"{file.stem}: annotation {annotation['name']}", annotation["expr"], instant=False)
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                where = f"{file.stem}: {panel['type']} {panel['title']} {target['refId']}"
                yield Query(where, target["expr"], instant=target["instant"])


def query_variables() -> Iterator[tuple[str, str, str]]:
    """Return each variable whose values Grafana asks Prometheus for: its name, and the label of which metric it is."""
    for file in sorted(DASHBOARDS.glob("*.json")):
        for variable in json.loads(file.read_text(encoding="utf-8"))["templating"]["list"]:
            if variable["type"] == "query":
                listed = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
                assert listed is not None, variable
                yield variable["name"], listed[2], listed[1]


def rules() -> list[dict[str, Any]]:
    """Return the rules of all files."""
    files = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted(RULES.glob("*.yaml"))]
    return [rule for content in files for group in content["groups"] for rule in group["rules"]]


def rule_queries() -> Iterator[Query]:
    """Return the expression of every rule; alerts of one name differ in the labels that they add."""
    for rule in rules():
        yield Query(" ".join([rule.get("record") or rule["alert"], *rule.get("labels", {}).values()]), rule["expr"])


def values(prometheus: Prometheus, query: Query) -> list[float]:
    """Return what a query answers: values of now, or of the last 15 minutes."""
    if query.instant:
        return prometheus.values(query.expr)
    now = time.time()
    return prometheus.range_values(query.expr, start=str(now - 900), end=str(now), step="10")


def test_every_query_answers_during_a_hang(tmp_path: Path, dumps: Path, page: Page) -> None:
    """No panel, variable or rule gives an error, and only those that speak of what did not happen are empty."""
    with serving(tmp_path, watching(dumps)) as exporter, page(exporter.address) as path:
        drill(dumps)
        wait_until(lambda: path.pager.of("FRHang"))
        # The last rule of the lag view, which may be an evaluation later than the page.
        wait_until(lambda: path.prometheus.values("process_group_rank:fr_rank_last_enqueued_seq_id:laggard"))
        chosen = {"training_job": JOB, "instance": exporter.address}
        shown = [replace(query, expr=Template(query.expr).substitute(GRAFANA | chosen)) for query in panel_queries()]
        queries = [*shown, *rule_queries()]
        may_be_empty = set().union(*EMPTY.values())
        assert may_be_empty <= {query.where for query in queries}
        assert {query.where for query in queries if not values(path.prometheus, query)} - may_be_empty == set()
        for variable, label, metric in query_variables():
            assert path.prometheus.ask(f"label/{label}/values", **{"match[]": metric}) == [chosen[variable]]
        wait_until(lambda: all(rule["health"] != "unknown" for rule in path.prometheus.rules()))
        assert {(rule["health"], rule.get("lastError")) for rule in path.prometheus.rules()} == {("ok", None)}


def test_every_metric_that_is_asked_for_exists() -> None:
    """Panels, variables and rules read what the catalogue has, what the rules record, and `up`."""
    suffixes = {"gauge": ("",), "counter": ("",), "histogram": ("_bucket", "_sum", "_count")}
    exported = {name + suffix for name, spec in CATALOG.items() for suffix in suffixes[spec.type]}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    asked = {name for query in (*panel_queries(), *rule_queries()) for name in metric_names(query.expr)}
    asked |= {metric for _, _, metric in query_variables()}
    assert asked - exported - recorded == {"up"}


def test_the_message_of_a_real_incident(tmp_path: Path, dumps: Path, page: Page, shared_dumps: Path) -> None:
    """Whoever reads the page of two lost GPUs need open nothing: who, where, what, why, and whether a restart helps."""
    with serving(tmp_path, watching(dumps)) as exporter, page(exporter.address) as path:
        for rank in range(16):
            shutil.copyfile(shared_dumps / "nvrx" / "gpu_error_1st" / f"_dump_{rank}", dumps / f"_dump_{rank}")
            time.sleep(0.1)
        wait_until(lambda: path.pager.messages)

        assert list(path.pager.messages) == ["/pagerduty"]
        [message] = path.pager.messages["/pagerduty"]
        assert message["payload"]["summary"] == (
            f"[FIRING] FRHang: Training job {JOB} hangs in all_to_all at 20537 of process group 74"
            " EXPERT_MODEL_PARALLEL_GROUP; suspect ranks 12,14: device stall"
        )
        text = message["payload"]["custom_details"]["firing"].splitlines()
        assert f"Training job: {JOB}" in text
        assert "Hung: process group 74 EXPERT_MODEL_PARALLEL_GROUP, all_to_all at sequence ID 20537" in text
        assert "Suspects: ranks 12,14" in text
        assert any(line.startswith("Cause: device stall: ") for line in text)
        assert "Restart: possible after isolating the suspects" in text
