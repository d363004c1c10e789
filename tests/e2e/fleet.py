"""A fleet: node exporters that publish, a fleet exporter that reads, and the dumps of a job spread over the nodes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fr_exporter.simulate import Job, Truth, formats
from tests.e2e.exporter import Config, Exporter, serving

RANKS_PER_NODE = 8
POLL_S = 1.0
# Long enough for the ranks that land one after another, short enough to wait for those that never do.
GRACE_S = 6.0


@dataclass(frozen=True, slots=True)
class Node:
    """A node exporter, and the directory with one folder of dumps a job that it watches."""

    exporter: Exporter
    dumps: Path

    @property
    def waiting(self) -> float | None:
        """How many objects wait to be published."""
        return self.exporter.value("fr_exporter_publish_spool_files")


@dataclass(frozen=True, slots=True)
class Fleet:
    """The node exporters by rank of their node, and the exporter that reads what they publish."""

    nodes: Sequence[Node]
    exporter: Exporter


@contextmanager
def fleet(
    directory: Path, nodes: int, url: str, env: Mapping[str, str], *, fleet_url: str | None = None
) -> Iterator[Fleet]:
    """Run as many node exporters and one fleet exporter over a store."""
    with ExitStack() as stack:
        running = [stack.enter_context(node_exporter(directory, number, url, env)) for number in range(nodes)]
        yield Fleet(running, stack.enter_context(fleet_exporter(directory / "fleet", fleet_url or url, env)))


@contextmanager
def node_exporter(directory: Path, number: int, url: str, env: Mapping[str, str]) -> Iterator[Node]:
    """Run the exporter of one node, which publishes each job below its directory of dumps."""
    home = directory / node_name(number)
    dumps = home / "dumps"
    dumps.mkdir(parents=True, exist_ok=True)
    config = {
        "targets": [{"path": str(dumps), "discover": True, "scope": "node"}],
        "dump_set": {"grace": f"{GRACE_S:g}s"},
        "topology": {"node": node_name(number)},
        "publish": {"url": url, "spool_dir": str(home / "spool")},
    }
    with serving(home, config, env=env) as exporter:
        yield Node(exporter, dumps)


@contextmanager
def fleet_exporter(directory: Path, url: str, env: Mapping[str, str], **more: Any) -> Iterator[Exporter]:
    """Run an exporter that serves every job below a URL."""
    directory.mkdir(exist_ok=True)
    config: Config = {
        "targets": [{"url": url, "discover": True}],
        "watch": {"poll_interval": f"{POLL_S:g}s"},
        "dump_set": {"grace": f"{GRACE_S:g}s"},
        **more,
    }
    with serving(directory, config, env=env) as exporter:
        yield exporter


def node_name(number: int) -> str:
    """Return the name of a node."""
    return f"node-{number:02}"


def dump_on_nodes(
    job: Job, name: str, directory_of: Callable[[int], Path], *, ranks: Sequence[int] | None = None
) -> float:
    """Let the ranks of a job dump, each on its node; return when the last was written, seconds since the epoch."""
    moments = {rank: moment for rank, moment in job.moments.items() if ranks is None or rank in ranks}
    hung_since_ns = time.time_ns() - min(job.moments.values())
    for rank, moment_ns in sorted(moments.items(), key=lambda dump: dump[1]):
        # The ranks of a hang stand still; those of a job that goes on are dumped as they are now.
        epoch_ns = hung_since_ns if job.truth.verdict == "hang" else time.time_ns() - moment_ns
        dumps = directory_of(rank // RANKS_PER_NODE) / name
        dumps.mkdir(exist_ok=True)
        (dumps / f"_dump_{rank}").write_bytes(formats.to_pickle(job.dump(rank, epoch_ns)))
    return time.time()


def diagnosis(exporter: Exporter, training_job: str) -> dict[str, Any]:
    """Return what an exporter says of a job; an error is a diagnosis without a verdict."""
    said: dict[str, Any] = {"verdict": None, "partial": None, "dumped_ranks": []}
    return {**said, **json.loads(exporter.get(f"/api/v1/diagnosis?training_job={training_job}"))}


def is_final(exporter: Exporter, training_job: str, ranks: int) -> bool:
    """Tell whether an exporter has a verdict over so many ranks that is not partial."""
    said = diagnosis(exporter, training_job)
    return said["partial"] is False and len(said["dumped_ranks"]) == ranks


def assert_says(said: Mapping[str, Any], truth: Truth) -> None:
    """Assert that a diagnosis is what the truth asks for: verdict, suspects, cause and hung process group."""
    assert said["verdict"] == truth.verdict, said["summary"]
    named = set(said["suspect_ranks"])
    assert named >= set(truth.required), said["summary"]
    assert named <= set(truth.allowed), said["summary"]
    if truth.verdict == "hang":
        assert named
        assert said["cause"] in truth.causes, said["summary"]
        assert said["hung_process_groups"][0]["process_group"] in {call.process_group for call in truth.hung}


def take_away(directory: Path) -> Callable[[], object]:
    """Let a shared directory vanish as a lost mount does; return what brings it back."""
    elsewhere = directory.with_name(f"{directory.name}.away")
    os.rename(directory, elsewhere)
    return lambda: os.rename(elsewhere, directory)
