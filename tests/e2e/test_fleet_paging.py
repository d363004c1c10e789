"""From the dumps of two nodes to one page, through a real Prometheus and Alertmanager."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fr_exporter.simulate import Injection, Plan, Schedule, Sizes, simulate
from tests.e2e.exporter import wait_until
from tests.e2e.fleet import dump_on_nodes, fleet, fleet_exporter, is_final
from tests.e2e.paging import paging

pytestmark = pytest.mark.e2e

JOB = "two-nodes"
# Whoever would page twice does so within the minute after which nodes page by themselves where no fleet is.
ALONE_S = 75


def test_a_hang_over_two_nodes_pages_once(tmp_path: Path, require_tool: Callable[[str], str]) -> None:
    """The one page names the guilty rank and its node, with both nodes and two fleet exporters telling of the hang."""
    shared = tmp_path / "shared"
    shared.mkdir()
    url = f"file://{shared}"
    job = simulate(Plan(Sizes(tensor=4, data=4), (Injection("host_stall", (11,)),), Schedule(steps=3, layers=1)))
    with fleet(tmp_path, 2, url, {}) as running, fleet_exporter(tmp_path / "second", url, {}) as second:
        exporters = [*(node.exporter for node in running.nodes), running.exporter, second]
        with paging(tmp_path, require_tool, [exporter.address for exporter in exporters]) as path:
            dump_on_nodes(job, JOB, lambda node: running.nodes[node].dumps)
            wait_until(lambda: path.pager.of("FRHang"))
            wait_until(lambda: is_final(second, JOB, 16))
            for node in running.nodes:
                assert node.exporter.value("fr_verdict", training_job=JOB, verdict="healthy") == 0
                assert node.exporter.value("fr_waiting_ranks", training_job=JOB)
            time.sleep(ALONE_S)

            [told] = path.pager.of("FRHang")
            [alert] = [alert for alert in told.body["alerts"] if alert["labels"]["alertname"] == "FRHang"]
            lines = alert["annotations"]["description"].splitlines()
            assert job.truth.required == (11,)
            assert "Suspects: rank 11 on node-01" in lines
            assert alert["labels"]["cause"] in job.truth.causes
