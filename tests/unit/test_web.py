"""What the exporter answers over HTTP, asked through WSGI as a server would."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any
from urllib.parse import quote
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

import pytest
from prometheus_client import CollectorRegistry, Gauge

from fr_exporter.diagnosis import Cause
from fr_exporter.incidents import Incident
from fr_exporter.store import TargetState
from fr_exporter.web.app import make_app
from tests.unit import diagnosis_values as values

TWELVE_MINUTES_LATER = values.SINCE + 12 * 60 * values.SECOND
HANG = values.target(values.device_stall())
MISMATCH = values.target(values.mismatch())
HEALTHY = values.target(values.diagnosis(training_job="calm"))
IDLE = values.target()
# A directory of jobs that cannot be read: there is a state of it, without a job's name.
UNLISTED = values.target(training_job="", watch_up=False)


@dataclass
class Answer:
    """A response as a client sees it."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode("utf-8")

    def json(self) -> Any:
        """Return the body's JSON document."""
        assert self.headers["Content-Type"] == "application/json"
        return json.loads(self.body)


@dataclass
class Site:
    """The app over a snapshot, and what it was told to do."""

    targets: Iterable[TargetState] = ()
    incidents: Iterable[Incident] = ()
    ready: bool = True
    reload: Callable[[], str | None] | None = None
    scrapes: list[str] = field(default_factory=list)

    def ask(self, path: str, method: str = "GET", **environ: str) -> Answer:
        """Send one request; the app must keep to WSGI."""
        registry = CollectorRegistry()
        Gauge("fr_hang", "1 while an incident is open.", registry=registry).set(1)
        app = make_app(
            snapshot=lambda: values.snapshot(self.targets, self.incidents),
            registry=registry,
            config_text=lambda: "web: {listen: ':19140'}",
            ready=lambda: self.ready,
            reload=self.reload,
            scraped=lambda: self.scrapes.append(path),
            now_ns=lambda: TWELVE_MINUTES_LATER,
            version="1.2.3",
        )
        raw_path, _, query = path.partition("?")
        request: dict[str, Any] = {"REQUEST_METHOD": method, "PATH_INFO": raw_path, "QUERY_STRING": query}
        request |= {"SCRIPT_NAME": "", "wsgi.input": BytesIO(), **environ}
        setup_testing_defaults(request)
        started: list[tuple[str, list[tuple[str, str]]]] = []

        def start_response(status: str, headers: list[tuple[str, str]], *_: Any) -> Callable[[bytes], object]:
            started.append((status, headers))
            return lambda _: None

        chunks = validator(app)(request, start_response)
        body = b"".join(chunks)
        chunks.close()  # type: ignore[attr-defined]
        status, headers = started[0]
        return Answer(int(status.split()[0]), dict(headers), body)


def words(page: str) -> str:
    """Return what a reader sees of a page: no tags, no style, single spaces."""
    shown = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", shown))


def test_the_landing_page_says_what_hung_and_who_made_it_wait() -> None:
    """Verdict, summary, incident, age, suspects with node, cause, confidence and evidence, and the hung groups."""
    page = words(Site([HANG]).ask("/").text)
    for expected in (
        "Hang llm-70b",
        "Ranks 12 and 14 stopped on their devices",
        "Open incident 20250923T065505Z-a1b2c3",
        "Stuck since 2025-09-23 06:55:05 UTC, 12 min ago",
        "Cause device_stall Restart can help once the suspects are isolated (CONTINUE)",
        "12 node01 device_stall high is stuck in call 42806 of group 41, which rank 13 completed",
        "14 node01 device_stall high is stuck in call 42806 of group 42",
        "74 EXPERT_MODEL_PARALLEL_GROUP nccl:all_to_all 20537 13, 15 12, 14",
        "16 of 16 ranks",
    ):
        assert expected in page


def test_the_landing_page_shows_hangs_first() -> None:
    """Whatever the order of the targets, the job that hangs stands above those that do not."""
    page = Site([IDLE, HEALTHY, HANG, UNLISTED]).ask("/").text
    positions = [page.index(f"</b> {job}") for job in ("llm-70b", "calm")]
    assert positions == sorted(positions)
    assert page.index("</b> llm-70b") < page.index("</b> idle")
    assert "<title>1 of 3 jobs hanging" in page


def test_the_landing_page_lists_what_was_not_read() -> None:
    """Missing, pending, stale, remote and unreadable are named, so are mismatches, warnings, and a partial set."""
    page = words(Site([MISMATCH]).ask("/").text)
    for expected in (
        "vision (this node only)",
        "Ranks may still be writing",
        "missing: rank 3 (no dump)",
        "pending: rank 4 (may still write)",
        "stale: ranks 5-6 (only a dump of an earlier time, left out)",
        "remote: ranks 8-15 (outside this node)",
        "unreadable: /dumps/_dump_7: the file ends before the dump does",
        "pg_status of rank 2 could not be mapped",
        "[104857600] on ranks 1-2; [209715200] on rank 0",
    ):
        assert expected in page


def test_the_landing_page_before_any_dump() -> None:
    """An exporter without dumps says so, and where it looks; one whose directory is gone says that too."""
    assert "No dumps yet: watching /dumps" in words(Site([IDLE]).ask("/").text)
    assert "/dumps cannot be watched" in words(Site([replace(IDLE, watch_up=False)]).ask("/").text)
    assert "No training job is watched" in words(Site().ask("/").text)


def test_yesterdays_hang_does_not_look_like_one() -> None:
    """A verdict of hang without an open incident is called past, and not counted as hanging."""
    page = Site([replace(HANG, hang=False, incident=None)]).ask("/").text
    assert "Past hang, no incident open" in words(page)
    assert "<title>no hang" in page


def test_suspects_with_one_finding_share_a_row() -> None:
    """A communication fault suspects every member for one reason: it is said once, with the ranks as ranges."""
    evidence = "arrived in the same call as all 512 members"
    fault = values.diagnosis(
        verdict="hang",
        cause=Cause.COMMUNICATION_FAULT,
        suspects=tuple(values.suspect(rank, cause=Cause.COMMUNICATION_FAULT, evidence=evidence) for rank in range(512)),
    )
    page = words(Site([values.target(fault)]).ask("/").text)
    assert page.count(f"each {evidence}") == page.count(evidence) == 1
    assert "0-511" in page


def test_names_from_dumps_are_text_on_the_page() -> None:
    """Markup in a job or a node is shown, not obeyed; what turns the reading direction is shown as its code."""
    nasty = '<script>alert("1")</script>\u202e\udcff'
    found = replace(values.device_stall(), training_job=nasty, summary=nasty, suspects=(values.suspect(0, node=nasty),))
    page = Site([values.target(found)]).ask("/").text
    assert "<script" not in page
    assert "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;\\u202e\\udcff" in page


def test_the_json_link_of_a_job_leads_to_its_diagnosis() -> None:
    """Whatever a directory is called, the link on the page asks for that job."""
    nasty = 'a&b=c "d"/é\udcff'
    site = Site([values.target(values.diagnosis(training_job=nasty)), IDLE])
    link = re.search(r'href="(/api/v1/diagnosis\?[^"]*)"', site.ask("/").text)
    assert link is not None
    assert site.ask(link[1]).json()["training_job"] == nasty


def test_a_diagnosis_is_that_of_the_command_line() -> None:
    """The API gives `Diagnosis.to_dict()`; the job may be left out where there is one."""
    expected = json.loads(json.dumps(values.device_stall().to_dict()))
    assert Site([HANG]).ask("/api/v1/diagnosis").json() == expected
    assert Site([HANG, IDLE]).ask("/api/v1/diagnosis?training_job=llm-70b").json() == expected
    assert Site([UNLISTED, HANG]).ask("/api/v1/diagnosis").json() == expected


@pytest.mark.parametrize(
    ("targets", "query", "status", "message"),
    [
        ([HANG, IDLE], "", 400, "training_job"),
        ([HANG, IDLE], "?training_job=other", 404, "no such training job: other"),
        ([HANG, IDLE], "?training_job=idle", 404, "no dumps of idle yet: watching /dumps"),
        ([HANG], "?training_job=", 404, "no such training job"),
        ([], "", 404, "no training job is watched"),
        ([UNLISTED], "", 404, "no training job is watched"),
    ],
)
def test_a_diagnosis_that_cannot_be_given(targets: list[TargetState], query: str, status: int, message: str) -> None:
    """Each way to ask in vain has its status and one clear line; where another name would do, the jobs are listed."""
    answer = Site(targets).ask(f"/api/v1/diagnosis{query}")
    assert answer.status == status
    assert message in answer.json()["error"]
    if status == 400 or "such" in message:
        assert answer.json()["training_jobs"] == [target.training_job for target in targets]


def test_all_diagnoses_hangs_first() -> None:
    """Jobs without dumps have none to give."""
    found = Site([IDLE, HEALTHY, HANG]).ask("/api/v1/diagnoses").json()
    assert [entry["training_job"] for entry in found] == ["llm-70b", "calm"]


def test_incidents_are_listed_newest_first_and_found_by_id() -> None:
    """The list says what and when; one incident by its ID has the whole diagnosis."""
    newer = values.incident(values.device_stall(), id="20250923T065505Z-a1b2c3")
    older = values.incident(values.mismatch(), id="20250922T010000Z-ffffff", closed_at_ns=values.ANALYSED)
    site = Site(incidents=[newer, older])
    listed = site.ask("/api/v1/incidents").json()
    assert [(entry["incident"], entry["closed_at_ns"]) for entry in listed] == [
        ("20250923T065505Z-a1b2c3", None),
        ("20250922T010000Z-ffffff", values.ANALYSED),
    ]
    assert listed[0]["suspect_ranks"] == [12, 14]
    found = site.ask("/api/v1/incidents/20250922T010000Z-ffffff").json()
    assert found["since_ns"] == values.SINCE
    assert found["diagnosis"]["training_job"] == "vision"
    missing = site.ask("/api/v1/incidents/nothing")
    assert (missing.status, "no such incident: nothing" in missing.json()["error"]) == (404, True)


def test_metrics_are_served_in_the_format_asked_for() -> None:
    """Prometheus text by default, OpenMetrics where the scraper accepts it; each scrape is noted, a HEAD is none."""
    site = Site()
    answer = site.ask("/metrics")
    assert (answer.status, "fr_hang 1.0" in answer.text) == (200, True)
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    openmetrics = site.ask("/metrics", HTTP_ACCEPT="application/openmetrics-text; version=1.0.0")
    assert openmetrics.headers["Content-Type"].startswith("application/openmetrics-text")
    assert openmetrics.text.endswith("# EOF\n")
    assert site.ask("/metrics", method="HEAD").status == 200
    assert site.scrapes == ["/metrics", "/metrics"]


def test_health_and_readiness() -> None:
    """Healthy from the start; ready once the first scan is done."""
    site = Site(ready=False)
    assert (site.ask("/-/healthy").status, site.ask("/-/ready").status) == (200, 503)
    site.ready = True
    assert site.ask("/-/ready").status == 200


@pytest.mark.parametrize(
    ("reload", "status", "line"),
    [
        (None, 403, "reloading over HTTP is off: set web.enable_reload, or send SIGHUP"),
        (lambda: None, 200, "configuration reloaded"),
        (lambda: "config.yaml: line 3: unknown key targts", 500, "config.yaml: line 3: unknown key targts"),
    ],
)
def test_reload(reload: Callable[[], str | None] | None, status: int, line: str) -> None:
    """Off, done, or refused with the configuration's own error."""
    answer = Site(reload=reload).ask("/-/reload", method="POST")
    assert (answer.status, answer.text) == (status, f"{line}\n")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/", "GET, HEAD"),
        ("DELETE", "/api/v1/incidents/x", "GET, HEAD"),
        ("OPTIONS", "/metrics", "GET, HEAD"),
        ("GET", "/-/reload", "POST"),
    ],
)
def test_other_methods_are_refused(method: str, path: str, allowed: str) -> None:
    """405 with the methods that would do, and nothing is done."""
    answer = Site([HANG], reload=lambda: pytest.fail("reloaded")).ask(path, method=method)
    assert (answer.status, answer.headers["Allow"]) == (405, allowed)


@pytest.mark.parametrize(
    "path", ["/", "/metrics", "/api/v1/diagnosis", "/api/v1/incidents", "/config", "/-/healthy", "/no"]
)
def test_head_is_get_without_its_body(path: str) -> None:
    """HEAD has the status and headers of GET."""
    site = Site([HANG])
    get, head = site.ask(path), site.ask(path, method="HEAD")
    assert head == replace(get, body=b"")
    assert int(get.headers["Content-Length"]) == len(get.body)


def test_what_is_not_there() -> None:
    """People get a page that leads back, programs JSON; what was asked for is shown as text."""
    page = Site().ask(quote("/<b>x"))
    assert (page.status, "<b>x" in page.text) == (404, False)
    assert 'href="/"' in page.text
    missing = Site().ask("/api/v2/diagnosis")
    assert (missing.status, missing.json()) == (404, {"error": "no such path: /api/v2/diagnosis"})


def test_the_effective_configuration_is_shown() -> None:
    """/config is the text the daemon gives, as text."""
    answer = Site().ask("/config")
    assert (answer.text, answer.headers["Content-Type"]) == ("web: {listen: ':19140'}\n", "text/plain; charset=utf-8")


@pytest.mark.parametrize("path", ["/", "/metrics", "/api/v1/diagnoses", "/no"])
def test_every_answer_forbids_what_it_does_not_need(path: str) -> None:
    """No script, no frame, no foreign content, no guessing of types, on any path."""
    headers = Site([HANG]).ask(path).headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
