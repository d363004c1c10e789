"""Play a fleet on this machine: two nodes that each see half of a hang, and the fleet exporter that sees all of it.

Two node exporters and one fleet exporter run as node.yaml and fleet.yaml say, over a directory in place of a shared
volume. 16 simulated ranks hang and dump, each to its own node. All of it is served until interrupted.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fr_exporter.simulate import Injection, Job, Plan, Sizes, simulate
from fr_exporter.simulate.writer import Output

HERE = Path(__file__).resolve().parent
NODES, RANKS_PER_NODE = ("node-0", "node-1"), 8
PREFIX = "nccl_trace_rank_"
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Exporter:
    """A running exporter: where it serves, and where it logs."""

    process: subprocess.Popen[bytes]
    log: Path

    def url(self) -> str:
        """Return the address that it said it serves."""
        found = re.search(r"serves (http://\S+?)/?$", self.log.read_text(), re.MULTILINE)
        return "" if found is None else found[1]

    def wait_ready(self) -> None:
        """Wait until it serves and has looked for what is there already."""
        self._wait("/-/ready", bool)

    def wait_for_ranks(self, count: int) -> dict[str, Any]:
        """Wait until it has the dumps of so many ranks, and return its diagnosis."""
        diagnosis: dict[str, Any] = json.loads(
            self._wait("/api/v1/diagnosis", lambda page: len(json.loads(page)["dumped_ranks"]) == count)
        )
        return diagnosis

    def _wait(self, path: str, is_there: Callable[[bytes], bool]) -> bytes:
        deadline = time.monotonic() + TIMEOUT_S
        while self.process.poll() is None and time.monotonic() < deadline:
            # ValueError: it has no address yet. OSError: no such page yet.
            with suppress(OSError, ValueError):
                with urllib.request.urlopen(f"{self.url()}{path}", timeout=5) as response:  # noqa: S310  our own loopback
                    page: bytes = response.read()
                if is_there(page):
                    return page
            time.sleep(0.1)
        raise SystemExit(f"An exporter gave no answer. Its log:\n{self.log.read_text()}")


def main() -> int:
    """Play it and return the exit code; Ctrl-C and SIGTERM end it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="fr-fleet-") as folder, ExitStack() as running:
            _play(Path(folder), running)
    except KeyboardInterrupt:
        pass
    return 0


def _play(folder: Path, running: ExitStack) -> None:
    fleet_url = f"file://{folder}/fleet"
    (folder / "fleet").mkdir()
    exporters = {}
    for node in NODES:
        dumps = folder / node
        dumps.mkdir()
        exporters[node] = running.enter_context(
            _serving(
                HERE / "node.yaml",
                folder / f"{node}.log",
                FR_FLEET_URL=fleet_url,
                FR_SPOOL_DIR=str(folder / "spool"),
                FR_TRAINING_JOB="demo",
                NODE_NAME=node,
                TORCH_FR_DUMP_TEMP_FILE=str(dumps / PREFIX),
            )
        )
    fleet = running.enter_context(_serving(HERE / "fleet.yaml", folder / "fleet.log", FR_FLEET_URL=fleet_url))
    for exporter in (*exporters.values(), fleet):
        exporter.wait_ready()

    job = simulate(Plan(Sizes(tensor=2, pipeline=2, data=4), (Injection("order_swapped"),)))
    [guilty] = job.truth.required
    where = NODES[guilty // RANKS_PER_NODE]
    print(f"16 ranks on two nodes hang: rank {guilty}, on {where}, issued two calls in the wrong order.", flush=True)
    _dump(job, folder)
    for node, exporter in exporters.items():
        _present(f"{node} alone", exporter.wait_for_ranks(RANKS_PER_NODE))
    _present("the fleet", fleet.wait_for_ranks(len(NODES) * RANKS_PER_NODE))
    print("\nWhat each serves:")
    for name, exporter in {**exporters, "the fleet": fleet}.items():
        print(f"  {exporter.url()}/  {name}")
    print(f"The store is {folder}/fleet. Ctrl-C ends it.", flush=True)
    fleet.process.wait()


@contextmanager
def _serving(config: Path, log: Path, **variables: str) -> Iterator[Exporter]:
    """Run an exporter on a free port of loopback."""
    environment: Mapping[str, str] = {**os.environ, **variables, "FR_LISTEN": "127.0.0.1:0"}
    command = [sys.executable, "-m", "fr_exporter", "serve", "--config", str(config)]
    # In a session of its own: Ctrl-C reaches this process alone.
    with (
        log.open("wb") as stream,
        subprocess.Popen(command, env=environment, stderr=stream, start_new_session=True) as process,
    ):
        try:
            yield Exporter(process, log)
        finally:
            # Asked to stop, a node exporter would serve its verdict for a while longer, which is meant for Prometheus.
            process.kill()


def _dump(job: Job, folder: Path) -> None:
    """Let each rank write its dump on its node."""
    epoch_ns = time.time_ns() - max(job.moments.values())
    for rank in job.moments:
        output = Output(folder / NODES[rank // RANKS_PER_NODE], prefix=PREFIX)
        output.path(rank).write_bytes(output.encode(job.dump(rank, epoch_ns)))


def _present(who: str, diagnosis: Mapping[str, Any]) -> None:
    print(f"\n{who}\n  {diagnosis['verdict'].upper()}: {diagnosis['summary']}")
    for suspect in diagnosis["suspects"]:
        print(f"  rank {suspect['rank']} on {suspect['node']}: {suspect['cause']}, {suspect['confidence']} confidence")
        print(f"    {suspect['evidence']}")


if __name__ == "__main__":
    sys.exit(main())
