"""What stands between an exporter and whoever is on call: Prometheus, Alertmanager, and a webhook in their place."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from tests.e2e.exporter import wait_until

DASHBOARDS = Path(__file__).resolve().parents[2] / "dashboards"
RULES = DASHBOARDS / "rules"
TEMPLATE = DASHBOARDS / "alertmanager.tmpl"
ALERTMANAGER_EXAMPLE = DASHBOARDS / "alertmanager.example.yaml"

# Where Alertmanager posts its own account of the alerts; other integrations post elsewhere.
ACCOUNT = "/alerts"
# By integration: the key of its secret, and what stands for it here.
_SECRETS = {
    "pagerduty_configs": ("routing_key_file", {"routing_key": "none", "url": "{webhook}/pagerduty"}),
    "slack_configs": ("api_url_file", {"api_url": "{webhook}/slack"}),
}


@dataclass(frozen=True, slots=True)
class Notification:
    """What Alertmanager posted, and when it came, in seconds since the epoch."""

    received_s: float
    body: dict[str, Any]


class Pager:
    """Keeps what was posted to a webhook, in its order: accounts of alerts, and by path what other receivers say."""

    def __init__(self) -> None:
        self.received: list[Notification] = []
        self.messages: dict[str, list[dict[str, Any]]] = {}

    def take(self, path: str, body: dict[str, Any]) -> None:
        """Keep what was posted now."""
        if path == ACCOUNT:
            self.received.append(Notification(time.time(), body))
        else:
            self.messages.setdefault(path, []).append(body)

    def of(self, alert: str, status: str | None = None) -> list[Notification]:
        """Return the notifications that speak of an alert, and where given say of it `firing` or `resolved`."""
        return [
            notification
            for notification in self.received
            if any(
                one["labels"]["alertname"] == alert and status in (None, one["status"])
                for one in notification.body["alerts"]
            )
        ]

    def story(self, alert: str) -> list[tuple[str, str]]:
        """Return what was told of an alert, in order: its status and its incident."""
        return [
            (one["status"], one["labels"]["incident"])
            for notification in self.received
            for one in notification.body["alerts"]
            if one["labels"]["alertname"] == alert
        ]


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus, asked over HTTP at its host and port."""

    address: str

    def ask(self, endpoint: str, **parameters: str) -> Any:
        """Return the data that an endpoint of the API answers; raise HTTPError where it answers with an error."""
        with urlopen(f"http://{self.address}/api/v1/{endpoint}?{urlencode(parameters)}", timeout=10) as response:
            return json.load(response)["data"]

    def values(self, expr: str, **parameters: str) -> list[float]:
        """Return the values of an instant vector, in no order; those that are not numbers (NaN) are no values."""
        values = [float(sample["value"][1]) for sample in self.ask("query", query=expr, **parameters)["result"]]
        return [value for value in values if value == value]

    def range_values(self, expr: str, **parameters: str) -> list[float]:
        """Return the values of all series over a range, in no order; those that are not numbers are no values."""
        series = self.ask("query_range", query=expr, **parameters)["result"]
        values = [float(value) for one in series for _, value in one["values"]]
        return [value for value in values if value == value]

    def rules(self) -> list[dict[str, Any]]:
        """Return all rules with their state."""
        return [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]


@dataclass(frozen=True, slots=True)
class Paging:
    """The path from a scrape to a page."""

    prometheus: Prometheus
    pager: Pager


@contextmanager
def paging(
    directory: Path, tool: Callable[[str], str], exporters: Sequence[str], *, evaluation_interval: str = "2s"
) -> Iterator[Paging]:
    """Run all of it for exporters at these addresses, with the committed rules, and wait until each was scraped once.

    `tool` returns the path of a program.
    """

    def written(name: str, config: dict[str, Any]) -> Path:
        file = directory / name
        file.write_text(json.dumps(config))
        return file

    with ExitStack() as stack:
        pager = Pager()
        routes = written("alertmanager.yml", routed_to(stack.enter_context(webhook(pager.take))))
        told = stack.enter_context(alertmanager(tool("prometheus-alertmanager"), routes, directory / "alertmanager"))
        config = {
            "global": {"scrape_interval": "2s", "evaluation_interval": evaluation_interval},
            "rule_files": [str(RULES / "*.yaml")],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [told]}]}]},
            "scrape_configs": [{"job_name": "fr_exporter", "static_configs": [{"targets": [*exporters]}]}],
        }
        command = [tool("prometheus"), "--storage.tsdb.path=data"]
        address = stack.enter_context(_running(command, written("prometheus.yml", config), directory / "prometheus"))
        prometheus = Prometheus(address)
        wait_until(lambda: "ready to receive web requests" in (directory / "prometheus" / "log").read_text())
        wait_until(lambda: sum(prometheus.values("up")) == len(exporters))
        yield Paging(prometheus, pager)


def routed_to(url: str) -> dict[str, Any]:
    """Return the example of an Alertmanager's configuration, made to tell a webhook all.

    Its routes, inhibitions and messages stay. Its receivers post to the webhook what they would post elsewhere, and
    Alertmanager's own account of the alerts besides. Only the wait before something is added to a notification is cut.
    """
    config: dict[str, Any] = yaml.safe_load(ALERTMANAGER_EXAMPLE.read_text(encoding="utf-8"))
    config["templates"] = [str(TEMPLATE)]
    for receiver in config["receivers"]:
        receiver["webhook_configs"] = [{"url": url + ACCOUNT, "send_resolved": True}]
        for integration, (secret, instead) in _SECRETS.items():
            for one in receiver.get(integration, ()):
                del one[secret]
                one.update({key: value.format(webhook=url) for key, value in instead.items()})
    routes = [config["route"]]
    while routes:
        route = routes.pop()
        route["group_interval"] = "1s"
        routes += route.get("routes", [])
    return config


@contextmanager
def webhook(take: Callable[[str, dict[str, Any]], None]) -> Iterator[str]:
    """Listen on loopback and pass on what is posted, with its path; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            take(self.path, json.loads(body))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_: object) -> None:
            """Write nothing to standard error."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def alertmanager(program: str, config: Path, directory: Path) -> AbstractContextManager[str]:
    """Run Alertmanager in a new directory; give its address."""
    # Debian's own storage paths are outside of the test's directory.
    return _running([program, "--cluster.listen-address=", "--storage.path=data"], config, directory)


@contextmanager
def _running(command: list[str], config: Path, directory: Path) -> Iterator[str]:
    """Run a server of the Prometheus project in a new directory, on a port that it chooses; yield its address."""
    directory.mkdir()
    log = directory / "log"

    def listens() -> re.Match[str] | None:
        return re.search(r'"Listening on".* address=(\S+)', log.read_text())

    options = [f"--config.file={config}", "--web.listen-address=127.0.0.1:0"]
    with (
        log.open("wb") as stream,
        subprocess.Popen([*command, *options], cwd=directory, stdout=stream, stderr=stream) as process,
    ):
        try:
            wait_until(lambda: process.poll() is not None or listens())
            listening = listens()
            assert listening is not None, log.read_text()
            yield listening[1]
        finally:
            process.kill()
