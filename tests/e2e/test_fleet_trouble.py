"""What may lie in a store beside good records: a clear state, a metric, and never a wrong suspect."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fr_exporter.analysis.progress import with_accounts
from fr_exporter.fleet.layout import Place, object_name
from fr_exporter.fleet.objectstore import ObjectStore
from fr_exporter.model import NodeRecords, RankDump
from fr_exporter.parsing import record
from fr_exporter.parsing.record import wire
from fr_exporter.simulate import Injection, Job, Plan, Schedule, Sizes, simulate
from tests.builders import SECOND, encode
from tests.e2e.exporter import Exporter, wait_until
from tests.e2e.fleet import RANKS_PER_NODE, assert_says, diagnosis, fleet_exporter, is_final, node_exporter, node_name
from tests.e2e.s3 import S3Server
from tests.records import RECENT_CALLS, read_dump

pytestmark = pytest.mark.e2e

JOB = "job"
NODES = 4
RANKS = NODES * RANKS_PER_NODE
MINUTE = 60 * SECOND


def hang(rank: int, seed: int = 0) -> Job:
    """Simulate a job of 4 nodes in which the host of a rank stalls."""
    plan = Plan(
        Sizes(tensor=4, pipeline=2, data=4), (Injection("host_stall", (rank,)),), Schedule(steps=3, layers=1), seed=seed
    )
    return simulate(plan)


class Nodes:
    """The nodes of a job, which publish at once what a simulation says that they dumped."""

    def __init__(self, store: ObjectStore, job: Job) -> None:
        self.store = store
        self.job = job
        self._epoch_ns = time.time_ns() - min(job.moments.values()) - 5 * SECOND

    def publish(self, node: int, *, attempt: int = 0, ahead_ns: int = 0, under: str | None = None) -> None:
        """Publish the ranks of a node whose clock is ahead, or those of a node that gives itself another's name."""
        ranks = range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE)
        dumps = tuple(self._dump(rank, ahead_ns) for rank in ranks if rank in self.job.moments)
        place = Place(JOB, attempt, under or node_name(node))
        records = NodeRecords(place.training_job, place.attempt, place.node, dumps)
        sent = record.stamp(record.encode(records, RECENT_CALLS), time.time_ns() + ahead_ns)
        self.store.write(object_name(place), sent)

    def _dump(self, rank: int, ahead_ns: int) -> RankDump:
        epoch_ns = self._epoch_ns + ahead_ns
        content = encode(self.job.dump(rank, epoch_ns))
        return with_accounts(read_dump(content, rank, mtime_ns=epoch_ns + self.job.moments[rank]))


@pytest.fixture
def store(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Return an empty store on a real S3-compatible server."""
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    return ObjectStore(s3.url)


@pytest.fixture
def exporter(s3: S3Server, tmp_path: Path) -> Iterator[Exporter]:
    """Return a fleet exporter of that store."""
    with fleet_exporter(tmp_path / "fleet", s3.url, s3.env) as started:
        yield started


def ranks_in_state(exporter: Exporter, state: str) -> float | None:
    """Return how many ranks are in a state."""
    return exporter.value("fr_dump_set_ranks", training_job=JOB, state=state)


def test_clocks_that_are_five_minutes_apart(store: ObjectStore, exporter: Exporter) -> None:
    """Every second node's clock is 5 minutes ahead: all records are of one incident, its time is the store's."""
    nodes = Nodes(store, hang(13))
    for node in range(NODES):
        nodes.publish(node, ahead_ns=5 * MINUTE if node % 2 else 0)

    wait_until(lambda: is_final(exporter, JOB, RANKS))
    said = diagnosis(exporter, JOB)
    assert_says(said, nodes.job.truth)
    times = [rank["dump_time_ns"] for rank in said["ranks"]]
    assert max(times) - min(times) < 30 * SECOND


def test_two_nodes_that_claim_the_same_ranks(store: ObjectStore, exporter: Exporter) -> None:
    """Node 2 also publishes under another name, from another hang: nobody knows which is right, so neither is used."""
    nodes = Nodes(store, hang(13))
    impostor = Nodes(store, hang(20, seed=1))
    for node in range(NODES):
        nodes.publish(node)
    impostor.publish(2, under="impostor")

    wait_until(lambda: ranks_in_state(exporter, "unreadable") == RANKS_PER_NODE)
    wait_until(lambda: diagnosis(exporter, JOB)["partial"] is False)
    said = diagnosis(exporter, JOB)
    assert (said["verdict"], said["suspect_ranks"]) == ("hang", [13])
    reasons = {file["error"] for file in said["unreadable_files"]}
    assert all("impostor" in reason and node_name(2) in reason for reason in reasons)


def test_records_of_a_former_attempt(store: ObjectStore, exporter: Exporter) -> None:
    """In attempt 1 node 3 is gone: its records of attempt 0 do not stand in for it, nor does its old stall count."""
    former = Nodes(store, hang(3, seed=2))
    for node in range(NODES):
        former.publish(node, attempt=0)
    wait_until(lambda: is_final(exporter, JOB, RANKS))
    assert diagnosis(exporter, JOB)["suspect_ranks"] == [3]

    lost = tuple(range(3 * RANKS_PER_NODE, RANKS))
    job = simulate(replace(hang(0).plan, injections=(Injection("killed", lost),), seed=4))
    now = Nodes(store, job)
    for node in range(NODES - 1):
        now.publish(node, attempt=1)
    wait_until(lambda: is_final(exporter, JOB, RANKS - RANKS_PER_NODE))
    said = diagnosis(exporter, JOB)
    assert_says(said, job.truth)
    assert said["missing_ranks"] == list(lost)


@pytest.mark.parametrize(
    ("damage", "result"),
    [
        (lambda data: data[: len(data) // 2], "partial"),
        (lambda _: b"\x80\x04\x95cos\nsystem\n", "partial"),
        (lambda _: wire.packed(b"\x91" * 1_000_000), "unreadable"),
        (lambda _: wire.packed(bytes(wire.MAX_BYTES + 1)), "rejected"),
    ],
    ids=["truncated", "pickle", "nested", "bomb"],
)
def test_an_object_that_is_no_object_of_records(
    store: ObjectStore, exporter: Exporter, damage: Callable[[bytes], bytes], result: str
) -> None:
    """A damaged object and a hostile one are named and counted; the other nodes' records give the verdict."""
    nodes = Nodes(store, hang(13))
    nodes.publish(3)
    name = object_name(Place(JOB, 0, node_name(3)))
    store.write(name, damage(store.read(name, 1 << 20)))
    for node in range(NODES - 1):
        nodes.publish(node)

    wait_until(lambda: diagnosis(exporter, JOB)["partial"] is False)
    said = diagnosis(exporter, JOB)
    assert (said["verdict"], said["suspect_ranks"]) == ("hang", [13])
    assert [(Path(file["file"]).name, bool(file["error"])) for file in said["unreadable_files"]] == [
        (node_name(3), True)
    ]
    assert (exporter.value("fr_exporter_dump_files_total", result=result) or 0) >= 1


def test_a_store_that_denies(s3: S3Server, tmp_path: Path) -> None:
    """With a wrong key the fleet exporter says that its store is down, a node that it waits to publish; both go on."""
    denied = {**s3.env, "AWS_SECRET_ACCESS_KEY": "a-secret-that-is-wrong"}
    with (
        fleet_exporter(tmp_path / "fleet", s3.url, denied) as exporter,
        node_exporter(tmp_path, 0, s3.url, denied) as node,
    ):
        wait_until(lambda: exporter.value("fr_exporter_watch_up", path=s3.url) == 0)
        assert exporter.values("fr_hang") == []
        assert "denied" in exporter.log()

        job = hang(3)
        (node.dumps / JOB).mkdir()
        for rank in range(RANKS_PER_NODE):
            (node.dumps / JOB / f"_dump_{rank}").write_bytes(encode(job.dump(rank, time.time_ns())))
        wait_until(lambda: node.exporter.value("fr_exporter_publish_total", result="denied"))
        assert node.waiting == 1
        assert "denied" in node.exporter.log()
        assert s3.env["AWS_SECRET_ACCESS_KEY"] not in node.exporter.log() + exporter.log()
        wait_until(lambda: node.exporter.values("fr_waiting_ranks", training_job=JOB))
