"""The configurations to copy: each is loaded by its program, and Alertmanager is seen to tell whom it should."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import yaml

from tests.e2e import paging
from tests.e2e.exporter import wait_until
from tests.e2e.paging import webhook

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "dashboards" / "rules"
EXAMPLE = ROOT / "dashboards" / "alertmanager.example.yaml"
MONITORING = ROOT / "examples" / "monitoring"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((MONITORING / "docker-compose.yaml").read_text())["services"]

INFRASTRUCTURE, TRAINING_CODE, CHAT = "infrastructure-on-call", "training-code-on-call", "chat"
SAID_BY_THE_PAGE = {"FRCollectiveMismatch", "FRRankDumpMissing", "FRInconclusive", "FRDumpUnreadable"}
# Name and severity of every alert.
ALERTS = {
    (rule["alert"], rule["labels"]["severity"])
    for group in yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}

SUMMARY = "Training job llm-7b hangs in all_to_all at 20537 of process group 74; suspect ranks 12,14: device stall"
RUNBOOK = "https://runbooks.example.com/runbook.md#frhang"
HANG = {
    "labels": {
        "alertname": "FRHang",
        "severity": "critical",
        "training_job": "llm-7b",
        "cluster": "east",
        "incident": "20250923T065505Z-1f0c3a",
        "cause": "device_stall",
        "attribution_state": "CONTINUE",
    },
    "annotations": {
        "summary": SUMMARY,
        "description": "Suspects: ranks 12,14 on node-3\nRestart: possible after isolating the suspects",
        "runbook_url": RUNBOOK,
    },
}

Tool = Callable[[str], str]


def like(alert: dict[str, Any], summary: str | None = None, **labels: str) -> dict[str, Any]:
    """Return an alert with other labels, and where given another summary."""
    annotations = alert["annotations"] if summary is None else {**alert["annotations"], "summary": summary}
    return {"labels": {**alert["labels"], **labels}, "annotations": annotations}


def ended(alert: dict[str, Any]) -> dict[str, Any]:
    """Return an alert as Prometheus sends it once it does not fire any more."""
    return {**alert, "startsAt": "2025-09-23T07:00:00Z", "endsAt": "2025-09-23T07:05:06Z"}


def run(*command: str | Path) -> str:
    """Return what a command printed; fail where its exit code is not 0."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


@dataclass(frozen=True, slots=True)
class Alertmanager:
    """A running Alertmanager, asked over HTTP at its host and port."""

    address: str

    def tell(self, *alerts: dict[str, Any]) -> None:
        """Post alerts as Prometheus does."""
        url, body = f"http://{self.address}/api/v2/alerts", json.dumps(alerts).encode()
        urlopen(Request(url, body, {"Content-Type": "application/json"}), timeout=10).close()

    def alerts(self) -> list[dict[str, Any]]:
        """Return the alerts that fire, with their state."""
        with urlopen(f"http://{self.address}/api/v2/alerts", timeout=10) as response:
            alerts: list[dict[str, Any]] = json.load(response)
        return alerts


@dataclass(slots=True)
class Messages:
    """What was posted to PagerDuty and to Slack, in its order."""

    url: str = ""
    pages: list[dict[str, Any]] = field(default_factory=list)
    chats: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture
def messages() -> Iterator[Messages]:
    """Listen on loopback, as PagerDuty and Slack do elsewhere."""
    kept = Messages()

    def take(_: str, message: dict[str, Any]) -> None:
        (kept.pages if "routing_key" in message else kept.chats).append(message)

    with webhook(take) as url:
        kept.url = f"{url}/"
        yield kept


@pytest.fixture
def alertmanager(tmp_path: Path, messages: Messages, prometheus_tool: Tool) -> Iterator[Alertmanager]:
    """Return an Alertmanager that runs the example with short waits; its secrets lead to the messages kept here."""
    secrets = {
        "infrastructure-routing-key": INFRASTRUCTURE,
        "training-code-routing-key": TRAINING_CODE,
        "chat-webhook-url": messages.url,
    }
    for name, secret in secrets.items():
        (tmp_path / name).write_text(secret)
    text = EXAMPLE.read_text().replace("/etc/alertmanager/secrets", str(tmp_path))
    text = re.sub(r"(group_wait|group_interval): .*", r"\1: 300ms", text)
    config = tmp_path / "example.yaml"
    config.write_text(f"{text}\nglobal:\n  pagerduty_url: {messages.url}\n")
    (tmp_path / "alertmanager.tmpl").symlink_to(EXAMPLE.with_name("alertmanager.tmpl"))
    with paging.alertmanager(prometheus_tool("prometheus-alertmanager"), config, tmp_path / "running") as address:
        yield Alertmanager(address)


def test_the_example_routes_each_alert_to_who_can_act(prometheus_tool: Tool) -> None:
    """A hang that a restart would meet again pages who owns the code, all else critical infrastructure's people."""
    amtool = prometheus_tool("amtool")
    assert "3 receivers" in run(amtool, "check-config", EXAMPLE)

    def receiver(**labels: str) -> str:
        matching = [f"{name}={value}" for name, value in labels.items()]
        return run(amtool, "config", "routes", "test", f"--config.file={EXAMPLE}", *matching).splitlines()[-1]

    for alert, severity in ALERTS:
        expected = INFRASTRUCTURE if severity == "critical" else CHAT
        assert receiver(alertname=alert, severity=severity, training_job="llm-7b") == expected
    assert receiver(**HANG["labels"]) == INFRASTRUCTURE
    assert receiver(**like(HANG, attribution_state="STOP")["labels"]) == TRAINING_CODE
    assert receiver(alertname="FRHang", severity="critical", training_job="llm-7b", scope="node") == INFRASTRUCTURE


@pytest.mark.e2e
def test_a_hang_silences_what_its_page_says_and_nothing_else(alertmanager: Alertmanager) -> None:
    """While FRHang fires, four warnings of the same job are inhibited; other jobs', and other alerts, are not."""

    def suppressed() -> set[tuple[str, str, str]]:
        return {
            (alert["labels"]["alertname"], alert["labels"]["training_job"], alert["labels"]["cluster"])
            for alert in alertmanager.alerts()
            if alert["status"]["inhibitedBy"]
        }

    alertmanager.tell(HANG)
    alertmanager.tell(
        *(
            {"labels": {"alertname": alert, "training_job": job, "cluster": cluster, "severity": severity}}
            for job, cluster in (("llm-7b", "east"), ("llm-7b", "west"), ("llm-13b", "east"))
            for alert, severity in ALERTS
            if alert != "FRHang"
        )
    )
    wait_until(lambda: len(suppressed()) >= len(SAID_BY_THE_PAGE))
    assert suppressed() == {(alert, "llm-7b", "east") for alert in SAID_BY_THE_PAGE}

    alertmanager.tell(ended(HANG))
    wait_until(lambda: not suppressed())


@pytest.mark.e2e
def test_the_messages_carry_the_verdict(alertmanager: Alertmanager, messages: Messages) -> None:
    """Page and chat say by themselves what fires, then what is over, and where to read on; so does the end."""
    pages = messages.pages
    alertmanager.tell(HANG)
    wait_until(lambda: pages)
    [page] = pages
    assert (page["routing_key"], page["event_action"]) == (INFRASTRUCTURE, "trigger")
    assert page["payload"]["summary"] == f"[FIRING] FRHang: {SUMMARY}"
    assert page["payload"]["custom_details"]["firing"].strip().splitlines() == [
        "FRHang",
        SUMMARY,
        "Cluster: east",
        *HANG["annotations"]["description"].splitlines(),
        f"Runbook: {RUNBOOK}",
    ]
    dashboard = "https://grafana.example.com/d/fr-incident/?var-training_job=llm-7b"
    assert {link["href"] for link in page["links"]} == {dashboard, RUNBOOK}

    # The verdict sharpens: the same page says what holds now, and what does not any more.
    sharper = like(HANG, "Training job llm-7b hangs; suspect rank 12: host stall", cause="host_stall")
    alertmanager.tell(sharper, ended(HANG))
    wait_until(lambda: len(pages) == 2)
    page = pages[1]
    assert (page["event_action"], page["dedup_key"]) == ("trigger", pages[0]["dedup_key"])
    assert page["payload"]["summary"] == f"[FIRING] FRHang: {sharper['annotations']['summary']}"
    assert SUMMARY not in page["payload"]["custom_details"]["firing"]
    assert page["payload"]["custom_details"]["resolved"] == f"FRHang resolved at 07:05:06 UTC\n{SUMMARY}\n\n"

    # A second incident, with another attribution.
    second = like(HANG, incident="20250923T071000Z-2b1d4c", attribution_state="STOP")
    alertmanager.tell(second)
    wait_until(lambda: len(pages) == 3)
    assert (pages[2]["routing_key"], pages[2]["event_action"]) == (TRAINING_CODE, "trigger")

    alertmanager.tell(ended(second))
    wait_until(lambda: len(pages) == 4)
    page = pages[3]
    assert (page["event_action"], page["dedup_key"]) == ("resolve", pages[2]["dedup_key"])


@pytest.mark.e2e
def test_a_second_incident_pages_although_the_first_is_open(alertmanager: Alertmanager, messages: Messages) -> None:
    """Each incident is a page of its own: a pager adds to an open one without ringing."""
    alertmanager.tell(HANG)
    wait_until(lambda: len(messages.pages) == 1)
    alertmanager.tell(like(HANG, incident="20250923T071000Z-2b1d4c"))
    wait_until(lambda: len(messages.pages) == 2)
    first, second = messages.pages
    assert first["dedup_key"] != second["dedup_key"]


@pytest.mark.e2e
def test_the_chat_is_told_of_warnings_and_of_their_end(alertmanager: Alertmanager, messages: Messages) -> None:
    """One message for one job, whose odd name is safe in the link; one for all exporters that are down."""
    warning = like(HANG, "2 dumps missing", alertname="FRRankDumpMissing", severity="warning", training_job="a b/c&d")
    down = [
        like(HANG, f"exporter {number} down", alertname="FRExporterDown", severity="warning", instance=f"node-{number}")
        for number in range(7)
    ]

    def told() -> dict[str, dict[str, Any]]:
        attachments = [chat["attachments"][0] for chat in messages.chats]
        return {attachment["title"]: attachment for attachment in attachments}

    alertmanager.tell(warning, *down)
    wait_until(lambda: len(told()) == 2)
    firing = told()["[FIRING] FRRankDumpMissing: 2 dumps missing"]
    link = "https://grafana.example.com/d/fr-incident/?var-training_job=a+b%2Fc%26d"
    assert firing["title_link"] == link
    assert firing["text"].startswith("FRRankDumpMissing\n2 dumps missing\n")
    assert f"\nRunbook: {RUNBOOK}\n" in firing["text"]
    assert firing["text"].endswith(f"\nDashboard: {link}")
    exporters = told()["[FIRING:7] FRExporterDown: exporter 0 down"]
    assert exporters["title_link"] == "https://grafana.example.com/d/fr-exporter/"
    assert "\nThese are 5 of 7.\n" in exporters["text"]
    assert "exporter 5 down" not in exporters["text"]

    alertmanager.tell(ended(warning))
    wait_until(lambda: len(told()) == 3)
    over = told()["[RESOLVED] FRRankDumpMissing: 2 dumps missing"]
    assert over["text"] == f"FRRankDumpMissing resolved at 07:05:06 UTC\n2 dumps missing\n\nDashboard: {link}"


@pytest.fixture
def containers(tmp_path: Path) -> Path:
    """Return a folder that holds the file system of each container, as far as it is mounted."""
    for service in SERVICES:
        for host, container in mounts(service):
            path = tmp_path / service / container.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(host)
    return tmp_path


def mounts(service: str) -> Iterator[tuple[Path, str]]:
    """Yield what is mounted into a container from where on the host, and where to."""
    for volume in SERVICES[service].get("volumes", []):
        host, container, mode = volume.split(":")
        assert mode == "ro"
        yield (MONITORING / host).resolve(), container


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_all_its_files_and_is_on_loopback(service: str) -> None:
    """What is mounted is there, read-only; what is published is for this machine; what is pulled has a version."""
    assert all(host.exists() for host, _ in mounts(service))
    assert all(re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port) for port in SERVICES[service].get("ports", []))
    build = SERVICES[service].get("build", {}).get("dockerfile_inline", "")
    image = SERVICES[service].get("image") or re.findall(r"^FROM (\S+)$", build, re.MULTILINE)[0]
    assert re.fullmatch(r"[a-z/]+:v?\d[\w.-]+", image)


def test_the_image_is_built_from_files_that_are_there() -> None:
    """Each file that the exporter's image copies is in the repository."""
    build = SERVICES["exporter"]["build"]
    for sources in re.findall(r"^COPY (.+) \S+$", build["dockerfile_inline"], re.MULTILINE):
        assert all((MONITORING / build["context"] / source).exists() for source in sources.split())


def test_the_mounted_configurations_are_valid(containers: Path, promtool: str, prometheus_tool: Tool) -> None:
    """Each program accepts what its container is given, and loads all rules and templates."""
    rules = run(promtool, "check", "config", containers / "prometheus/etc/prometheus/prometheus.yml")
    assert all(f"/rules/{file.name}" in rules for file in RULES.iterdir())
    told = run(prometheus_tool("amtool"), "check-config", containers / "alertmanager/etc/alertmanager/alertmanager.yml")
    assert "2 templates" in told
    config = containers / "exporter" / SERVICES["exporter"]["command"][-1].lstrip("/")
    run(sys.executable, "-m", "fr_exporter", "check-config", config)


def test_grafana_finds_prometheus_and_the_dashboards(containers: Path) -> None:
    """The one data source is the default, so dashboards start with it; all three are where Grafana looks."""
    grafana = containers / "grafana"
    provisioning = grafana / "etc/grafana/provisioning"
    [source] = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    assert (source["type"], source["isDefault"], source["uid"]) == ("prometheus", True, "fr-exporter-prometheus")
    [provider] = yaml.safe_load((provisioning / "dashboards/fr_exporter.yaml").read_text())["providers"]
    found = {path.name for path in (grafana / provider["options"]["path"].lstrip("/")).glob("*.json")}
    assert found == {"hang-overview.json", "incident.json", "exporter.json"}
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (grafana / home.lstrip("/")).is_file()


def test_the_services_speak_to_each_other() -> None:
    """Every address in a configuration is one at which a service of the same file listens."""
    served = {
        f"{service}:{port.rpartition(':')[2]}" for service in SERVICES for port in SERVICES[service].get("ports", [])
    }
    served.add(f"pager:{SERVICES['pager']['command'][-1]}")
    files = set(MONITORING.rglob("*.yaml")) - {MONITORING / "docker-compose.yaml"}
    spoken_to = set(re.findall(r"[a-z]+:\d+", "".join(file.read_text() for file in files)))
    assert spoken_to == served - {"grafana:3000"}


def test_the_services_route_as_the_example_does() -> None:
    """Routes, inhibitions and the names of the receivers are those of the example; only the receivers differ."""
    example, local = (yaml.safe_load(file.read_text()) for file in (EXAMPLE, MONITORING / "alertmanager.yaml"))
    for config in (example, local):
        config["receivers"] = [receiver["name"] for receiver in config["receivers"]]
    assert {**local, "templates": example["templates"]} == example


@pytest.mark.e2e
def test_the_pager_prints_the_page(containers: Path, tmp_path: Path, prometheus_tool: Tool) -> None:
    """The mounted configurations bring the message, with a link to the Grafana beside it, to the pager's log."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = str(free.getsockname()[1])
    mounted = containers / "alertmanager/etc/alertmanager"
    config = mounted / "on_loopback.yml"
    config.write_text((mounted / "alertmanager.yml").read_text().replace("pager:8080", f"127.0.0.1:{port}"))
    log = containers / "pager.log"
    last_line = "\nDashboard: http://127.0.0.1:3000/d/fr-incident/?var-training_job=llm-7b\n"
    command = [sys.executable, "-u", str(MONITORING / "pager.py"), port]
    program = prometheus_tool("prometheus-alertmanager")
    with (
        log.open("wb") as stream,
        subprocess.Popen(command, stdout=stream, stderr=stream) as process,
        paging.alertmanager(program, config, tmp_path / "running") as address,
    ):
        try:
            Alertmanager(address).tell(HANG)
            wait_until(lambda: last_line in log.read_text())
        finally:
            process.kill()
    assert f"=== {INFRASTRUCTURE}: [FIRING] FRHang: {SUMMARY}\n" in log.read_text()
