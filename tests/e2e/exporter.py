"""A running `fr-exporter serve`, and how to ask it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

Config = dict[str, Any]


class Exporter:
    """A running exporter, asked over HTTP. `address` is its host and port."""

    def __init__(self, process: subprocess.Popen[bytes], config: Path, stderr: Path) -> None:
        self.process = process
        self.config = config
        self.address = ""
        self._stderr = stderr

    def log(self) -> str:
        """Return what it wrote to standard error so far."""
        return self._stderr.read_text()

    def wait_ready(self) -> None:
        """Wait until it serves, and its start-up scan is done."""
        wait_until(lambda: self.process.poll() is not None or "serves http" in self.log())
        served = re.search(r"serves http://([^/\s]+)/", self.log())
        assert served is not None, self.log()
        self.address = served[1]
        wait_until(lambda: "not ready" not in self.get("/-/ready"))

    def get(self, path: str) -> str:
        """Return what a page answers, whatever its status."""
        with closing(HTTPConnection(self.address, timeout=5)) as connection:
            connection.request("GET", path)
            return connection.getresponse().read().decode()

    def values(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        """Scrape, and return the samples of this name that have these labels among their own."""
        families = text_string_to_metric_families(self.get("/metrics"))
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return [(sample.labels, sample.value) for sample in samples if labels.items() <= sample.labels.items()]

    def value(self, name: str, **labels: str) -> float | None:
        """Scrape, and return the value of the one sample with these labels, None where there is none."""
        values = self.values(name, **labels)
        assert len(values) <= 1, f"{name} {labels} is not one sample"
        return values[0][1] if values else None

    def suspects(self) -> set[int]:
        """Scrape, and return the suspect ranks."""
        return {int(labels["rank"]) for labels, value in self.values("fr_suspect_rank") if value == 1}


@contextmanager
def serving(directory: Path, config: Config, *, env: Mapping[str, str] | None = None) -> Iterator[Exporter]:
    """Run an exporter on a free port, with variables of its own; what the test does not stop is killed at its end."""
    config_file, stderr = directory / "config.yaml", directory / "stderr.log"
    write_config(config_file, config)
    command = [sys.executable, "-m", "fr_exporter", "serve", "--config", str(config_file)]
    environment = {**os.environ, **(env or {})}
    with stderr.open("wb") as stream, subprocess.Popen(command, stderr=stream, env=environment) as process:
        try:
            exporter = Exporter(process, config_file, stderr)
            exporter.wait_ready()
            yield exporter
        finally:
            process.kill()


def write_config(path: Path, config: Config) -> None:
    """Write a configuration (JSON is YAML) for a loopback port that the system chooses."""
    path.write_text(json.dumps({**config, "web": {"listen": "127.0.0.1:0", **config.get("web", {})}}))


def wait_until(condition: Callable[[], object], timeout: float = 30.0) -> None:
    """Poll until a condition holds; fail where it does not in time."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)
