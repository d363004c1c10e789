"""Many nodes, one verdict: node exporters publish to a real store, and a fleet exporter says who made the job wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from fr_exporter.simulate import Injection, Job, Plan, Schedule, Sizes, simulate
from tests.e2e.exporter import wait_until
from tests.e2e.fleet import (
    GRACE_S,
    POLL_S,
    RANKS_PER_NODE,
    Fleet,
    assert_says,
    diagnosis,
    dump_on_nodes,
    fleet,
    fleet_exporter,
    is_final,
    node_exporter,
    node_name,
    take_away,
)
from tests.e2e.s3 import S3Server

pytestmark = pytest.mark.e2e

NODES = 16
SIZES = Sizes(tensor=4, pipeline=4, data=8)
SCHEDULE = Schedule(steps=3, layers=1, microbatches=4)

FAULTS: Mapping[str, Injection] = {
    "host-stall": Injection("host_stall", (42,)),
    "node-lost": Injection("node_lost"),
    "link-fault": Injection("link_fault"),
    "mismatch": Injection("mismatch_operation"),
    "healthy": Injection("healthy"),
}


@dataclass(frozen=True, slots=True)
class Location:
    """A store: its URL, what an exporter's environment needs, and what takes it away and gives what brings it back."""

    url: str
    env: Mapping[str, str]
    fail: Callable[[], Callable[[], object]]


@pytest.fixture(scope="module", params=["s3", "file"])
def location(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Location]:
    """Return an S3-compatible server on loopback, and a directory that all share."""
    directory = tmp_path_factory.mktemp("store")
    if request.param == "file":
        shared = directory / "shared"
        shared.mkdir()
        yield Location(f"file://{shared}", {}, lambda: take_away(shared))
        return
    server = S3Server(directory)
    server.start()

    def fail() -> Callable[[], object]:
        server.kill()
        return server.start

    yield Location(f"{server.url}/fleet", server.env, fail)
    server.kill()


@pytest.fixture(scope="module")
def running(location: Location, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Return 16 node exporters and one fleet exporter over a store; a test has a training job of its own."""
    with fleet(tmp_path_factory.mktemp("fleet"), NODES, location.url, location.env) as started:
        yield started


def fault(name: str, seed: int = 0) -> Job:
    """Simulate a job of 128 ranks in which something goes wrong."""
    return simulate(Plan(SIZES, (FAULTS[name],), SCHEDULE, ranks_per_node=RANKS_PER_NODE, seed=seed))


def fault_across_nodes(name: str) -> Job:
    """Simulate a job in which something goes wrong that is no single node's."""
    jobs = (fault(name, seed) for seed in range(20))
    return next(job for job in jobs if len({rank // RANKS_PER_NODE for rank in job.truth.required}) > 1)


@pytest.mark.parametrize("name", FAULTS)
def test_the_fleet_says_what_is_true_of_the_job(running: Fleet, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """From 16 nodes of 8 ranks comes the exact verdict over the whole job, 2 s after the poll that brings the last."""
    job = fault_across_nodes(name) if name == "link-fault" else fault(name)

    written = dump_on_nodes(job, name, lambda node: running.nodes[node].dumps)
    wait_until(lambda: is_final(running.exporter, name, len(job.moments)))
    took_s = time.time() - written

    with capsys.disabled():
        print(f"\n{name}: last dump written -> fleet verdict: {took_s:.1f} s at a poll interval of {POLL_S:g} s")
    assert_says(diagnosis(running.exporter, name), job.truth)
    # Ranks that left no dump are waited for.
    assert took_s <= POLL_S + 2 + (GRACE_S if name == "node-lost" else 0)


def test_a_store_that_fails_in_the_middle_of_an_incident_loses_nothing(location: Location, running: Fleet) -> None:
    """Half of the ranks dump while the store is down: nodes go on, the fleet says that it is, and all arrives after."""
    job, name = fault("host-stall", seed=3), "store-fails"
    first = range(NODES * RANKS_PER_NODE // 2)
    rest = range(len(first), NODES * RANKS_PER_NODE)
    dump_on_nodes(job, name, lambda node: running.nodes[node].dumps, ranks=first)
    wait_until(lambda: len(diagnosis(running.exporter, name)["dumped_ranks"]) == len(first))

    bring_back = location.fail()
    dump_on_nodes(job, name, lambda node: running.nodes[node].dumps, ranks=rest)
    wait_until(lambda: all(node.waiting == 1 for node in running.nodes[NODES // 2 :]), timeout=60)
    wait_until(lambda: running.exporter.value("fr_exporter_watch_up", training_job=name) == 0, timeout=60)
    for node in running.nodes[NODES // 2 :]:
        assert node.exporter.value("fr_waiting_ranks", training_job=name) == RANKS_PER_NODE
    assert len(diagnosis(running.exporter, name)["dumped_ranks"]) == len(first)

    bring_back()
    wait_until(lambda: is_final(running.exporter, name, NODES * RANKS_PER_NODE), timeout=60)
    assert_says(diagnosis(running.exporter, name), job.truth)
    wait_until(lambda: all(node.waiting == 0 for node in running.nodes))
    assert running.exporter.value("fr_exporter_watch_up", training_job=name) == 1


def test_two_fleet_exporters_say_the_same(location: Location, running: Fleet, tmp_path: Path) -> None:
    """A second fleet exporter, started later, shows the same incident with the same labels, ID included."""
    job, name = fault("host-stall", seed=5), "twice"
    dump_on_nodes(job, name, lambda node: running.nodes[node].dumps)
    wait_until(lambda: running.exporter.values("fr_incident_info", training_job=name))

    with fleet_exporter(tmp_path / "second", location.url, location.env) as second:
        wait_until(lambda: second.values("fr_incident_info", training_job=name))
        assert second.values("fr_incident_info", training_job=name) == running.exporter.values(
            "fr_incident_info", training_job=name
        )


def test_a_node_that_ends_before_the_store_is_back_publishes_when_it_returns(
    location: Location, tmp_path: Path
) -> None:
    """Dumps and exporter of a node are gone before the store answers: the next exporter publishes from the spool."""
    job, name = fault("host-stall", seed=7), "spooled"
    with node_exporter(tmp_path, 0, location.url, location.env) as node:
        bring_back = location.fail()
        try:
            dump_on_nodes(job, name, lambda _: node.dumps, ranks=range(RANKS_PER_NODE))
            wait_until(lambda: node.waiting == 1)
            node.exporter.process.kill()
            node.exporter.process.wait()
            for file in (node.dumps / name).iterdir():
                file.unlink()
        finally:
            bring_back()
    with (
        node_exporter(tmp_path, 0, location.url, location.env),
        fleet_exporter(tmp_path / "fleet", location.url, location.env) as exporter,
    ):
        wait_until(lambda: diagnosis(exporter, name)["dumped_ranks"] == list(range(RANKS_PER_NODE)))
        reported = {rank["node"] for rank in diagnosis(exporter, name)["ranks"]}
        assert reported == {node_name(0)}
