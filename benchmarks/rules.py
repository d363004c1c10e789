"""Measure what the rules cost Prometheus when many nodes wait, each with an exporter of its own.

    python benchmarks/rules.py [--nodes N ...]      (needs prometheus and promtool; 1 GB of disk for 1,000 nodes)

Prints the figures of docs/performance.md as a table. Ten minutes of metrics are written into an empty database, then a
real Prometheus evaluates the committed rules over them and tells how long each group took.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

RULES = Path(__file__).resolve().parents[1] / "dashboards" / "rules"
ADDRESS = "127.0.0.1:19599"
RANKS_PER_NODE, GROUPS, NODES_PER_JOB = 8, 13, 100
SCRAPE_S, HISTORY_S, EVALUATION_S = 15, 600, 15
START_S = 120

Row = tuple[str, int]


def main() -> None:
    """Measure each number of nodes and print one line for each group of rules."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1_000], help="numbers of nodes to measure")
    columns = {nodes: _measure(nodes) for nodes in parser.parse_args().nodes}
    print("| group of rules |" + "".join(f" {nodes:,} nodes |" for nodes in columns))
    print("|---|" + "---|" * len(columns))
    for group in next(iter(columns.values())):
        print(f"| `{group}` |" + "".join(f" {seconds[group]:.2f} s |" for seconds in columns.values()))


def _measure(nodes: int) -> dict[str, float]:
    """Return the seconds of one evaluation of each group of rules."""
    with tempfile.TemporaryDirectory(prefix="fr-rules-") as folder:
        metrics, database = Path(folder, "metrics"), Path(folder, "data")
        with metrics.open("w") as file:
            file.writelines(_openmetrics(nodes, int(time.time())))
        command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(metrics), str(database)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        config = {"global": {"evaluation_interval": f"{EVALUATION_S}s"}, "rule_files": [f"{RULES}/*.yaml"]}
        Path(folder, "prometheus.yml").write_text(json.dumps(config))
        command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={database}"]
        command += [f"--web.listen-address={ADDRESS}", "--storage.tsdb.retention.time=1d", "--log.level=error"]
        with subprocess.Popen(command) as server:
            try:
                return _evaluated(server)
            finally:
                server.terminate()


def _evaluated(server: subprocess.Popen[bytes]) -> dict[str, float]:
    """Wait until each group was evaluated a second time, over what the first recorded, and return the seconds."""
    first: dict[str, str] = {}
    for _ in range(START_S):
        time.sleep(1)
        if server.poll() is not None:
            break
        groups = {group["name"]: group for group in _groups()}
        done = {name: group["lastEvaluation"] for name, group in groups.items() if not _is_pending(group)}
        if groups and done.keys() == groups.keys():
            first = first or done
            if all(done[name] != first[name] for name in done):
                return {name: group["evaluationTime"] for name, group in groups.items()}
    sys.exit(f"Prometheus did not evaluate the rules within {START_S} s")


def _is_pending(group: dict[str, Any]) -> bool:
    if failed := [rule for rule in group["rules"] if rule["health"] == "err"]:
        sys.exit(f"{failed[0]['name']}: {failed[0]['lastError']}")
    return any(rule["health"] == "unknown" for rule in group["rules"])


def _groups() -> list[dict[str, Any]]:
    try:
        with urlopen(f"http://{ADDRESS}/api/v1/rules", timeout=30) as response:
            groups: list[dict[str, Any]] = json.load(response)["data"]["groups"]
            return groups
    except OSError:  # not listening yet
        return []


def _openmetrics(nodes: int, now_s: int) -> Iterator[str]:
    """Yield ten minutes of what exporters of nodes show whose ranks all wait; dumps landed two minutes ago."""
    scrapes = range(now_s - HISTORY_S, now_s, SCRAPE_S)
    landed_s = now_s - 120
    since = [at for at in scrapes if at >= landed_s]
    for name, rows in _of_exporters(nodes).items():
        yield from _family(name, rows, scrapes)
    for name, rows in _of_ranks(nodes, landed_s).items():
        yield from _family(name, rows, since)
    yield "# EOF\n"


def _family(name: str, rows: Iterable[Row], times: Iterable[int]) -> Iterator[str]:
    yield f"# TYPE {name} gauge\n"
    for labels, value in rows:
        yield from (f"{name}{{{labels}}} {value} {at}\n" for at in times)


def _of_exporters(nodes: int) -> dict[str, list[Row]]:
    every = range(nodes)
    return {
        "up": [(_target(node), 1) for node in every],
        "fr_exporter_build_info": [(f'{_target(node)},version="0.1.0",python="3.13"', 1) for node in every],
        "fr_hang": [(_job(node), 0) for node in every],
        "fr_diagnosis_partial": [(_job(node), 0) for node in every],
        "fr_waiting_ranks": [(_job(node), RANKS_PER_NODE) for node in every],
        "fr_verdict": [
            (f'{_job(node)},verdict="{verdict}"', int(verdict == "inconclusive"))
            for node in every
            for verdict in ("none", "healthy", "hang", "inconclusive")
        ],
        "fr_dump_set_ranks": [
            (f'{_job(node)},state="{state}"', 0)
            for node in every
            for state in ("dumped", "missing", "pending", "stale", "unreadable", "remote")
        ],
    }


def _of_ranks(nodes: int, landed_s: int) -> dict[str, list[Row]]:
    ranks = [(node, rank) for node in range(nodes) for rank in range(RANKS_PER_NODE)]
    grouped = [(f'{_rank(*where)},process_group="{group}"', group) for where in ranks for group in range(GROUPS)]
    collectives = [(f'{labels},process_group_desc="",kind="collective"', 100 + group) for labels, group in grouped]
    return {
        "fr_rank_dump_timestamp_seconds": [(_rank(*where), landed_s) for where in ranks],
        "fr_rank_last_enqueued_seq_id": collectives,
        "fr_rank_last_completed_seq_id": [(labels, value - 1) for labels, value in collectives],
        "fr_rank_open_operations": [(f'{labels},process_group_desc=""', 1) for labels, _ in grouped],
    }


def _target(node: int) -> str:
    return f'job="fr_exporter",instance="node-{node}:19140"'


def _job(node: int) -> str:
    return f'{_target(node)},training_job="job-{node // NODES_PER_JOB}",scope="node"'


def _rank(node: int, rank: int) -> str:
    return f'{_job(node)},rank="{node % NODES_PER_JOB * RANKS_PER_NODE + rank}",rank_node="node-{node}"'


if __name__ == "__main__":
    main()
