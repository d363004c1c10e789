"""The reading side of the fleet: what is fetched, when, and what follows. Real objects in a real store, polled by hand.

Where a test says nothing else, the job has four ranks on two nodes and waits for rank 2, which is on the second.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from fr_exporter.analysis.progress import with_accounts
from fr_exporter.config import Config, load
from fr_exporter.diagnosis import Diagnosis
from fr_exporter.errors import StoreError
from fr_exporter.fleet.attempts import Attempts
from fr_exporter.fleet.discovery import Discovery
from fr_exporter.fleet.layout import Place, object_name
from fr_exporter.fleet.objectstore import ObjectInfo, ObjectStore
from fr_exporter.fleet.pool import Pool
from fr_exporter.metrics.telemetry import Telemetry
from fr_exporter.model import NodeRecords
from fr_exporter.parsing import record
from fr_exporter.store import Store, TargetState
from fr_exporter.worker import Worker
from tests.builders import SECOND, START_NS, Job
from tests.records import RECENT_CALLS, read_dump

NODES = {"n0": (0, 1), "n1": (2, 3)}


class WatchedStore:
    """A store in a directory that counts what it is asked for, and fails where it is told to."""

    def __init__(self, root: Path) -> None:
        self._store = ObjectStore(f"file://{root}")
        self.listings = 0
        self.reads: list[str] = []
        self.unlistable: set[str] = set()
        self.unreadable: set[str] = set()
        self.is_read_only = False
        self.hangs: threading.Event | None = None

    def folders(self, path: str) -> list[str]:
        """List folders."""
        self._list(path)
        return self._store.folders(path)

    def objects(self, path: str) -> list[ObjectInfo]:
        """List objects."""
        self._list(path)
        return self._store.objects(path)

    def read(self, path: str, max_bytes: int) -> bytes:
        """Read an object."""
        self.reads.append(path)
        if path in self.unreadable:
            raise StoreError("Forbidden", denied=True)
        return self._store.read(path, max_bytes)

    def remove(self, path: str) -> None:
        """Remove an object."""
        if self.is_read_only:
            raise StoreError("Forbidden", denied=True)
        self._store.remove(path)

    def _list(self, path: str) -> None:
        self.listings += 1
        if self.hangs is not None:
            self.hangs.wait()
        if path in self.unlistable:
            raise StoreError("Forbidden", denied=True)


class Fleet:
    """A store in a directory, and a worker on a bench that reads it; time passes when it is told to."""

    def __init__(self, root: Path, *targets: dict[str, Any]) -> None:
        self.root = root
        self.seconds = 0.0
        self.remote = WatchedStore(root)
        self.store = Store(history=10)
        self.registry = CollectorRegistry()
        self.worker = Worker(
            config(*(targets or ({"url": f"file://{root}", "discover": True},))),
            None,
            self.store,
            Telemetry(self.registry),
            clock=lambda: self.seconds,
            wall_ns=self.wall_ns,
            open_store=lambda _: self.remote,
        )

    def wall_ns(self) -> int:
        """Return the time since the epoch: two minutes after the calls of a job."""
        return START_NS + int((120 + self.seconds) * SECOND)

    def publish(
        self, job: Job, *nodes: str, name: str = "llm", attempt: int = 0, age_s: float = 0.0, ahead_s: float = 0.0
    ) -> None:
        """Publish what nodes have of a job, from dumps of some age, by clocks that are ahead."""
        for node in nodes or NODES:
            self.put(
                node_object(job, node, name, attempt, self.wall_ns() - int(age_s * SECOND), int(ahead_s * SECOND)),
                node,
                name=name,
                attempt=attempt,
                ahead_s=ahead_s,
            )

    def put(self, data: bytes, node: str, *, name: str = "llm", attempt: int = 0, ahead_s: float = 0.0) -> Path:
        """Put an object into the store, and return its path."""
        path = self.root / object_name(Place(name, attempt, node))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(record.stamp(data, self.wall_ns() + int(ahead_s * SECOND)) if data else data)
        os.utime(path, ns=(self.wall_ns(), self.wall_ns()))
        return path

    def poll(self) -> None:
        """Poll once, and have the worker take in what comes."""
        for poller in self.worker._stores._pollers.values():
            for act in poller.poll():
                act()
                self.worker.step()

    def wait(self, seconds: float) -> None:
        """Let time pass, and what is due be done."""
        end = self.seconds + seconds
        while self.seconds < end:
            self.seconds = min(self.seconds + 2, end)
            self.poll()
            self.worker.step()

    def state(self, name: str = "llm") -> TargetState:
        """Return what is known of a job."""
        return {state.training_job: state for state in self.store.snapshot().targets}[name]

    def jobs(self) -> list[str]:
        """Return the jobs there are."""
        return sorted(state.training_job for state in self.store.snapshot().targets)

    def diagnosis(self, name: str = "llm") -> Diagnosis:
        """Return the diagnosis of a job."""
        found = self.state(name).diagnosis
        assert found is not None
        return found

    def counted(self, metric: str) -> float:
        """Return the sum over the series of a metric."""
        samples = (sample for family in self.registry.collect() for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == metric)


@pytest.fixture
def make_fleet(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """Return what makes a fleet exporter with some targets."""
    fleets = []

    def make(*targets: dict[str, Any]) -> Fleet:
        fleets.append(Fleet(tmp_path, *targets))
        return fleets[-1]

    yield make
    for fleet in fleets:
        for poller in fleet.worker._stores._pollers.values():
            poller._pool.close()


@pytest.fixture
def fleet(make_fleet: Callable[..., Fleet]) -> Fleet:
    """Return a fleet exporter for every job of a store."""
    return make_fleet()


def config(*targets: dict[str, Any], **sections: object) -> Config:
    """Return a configuration."""
    return load(json.dumps({"targets": list(targets), **sections}), env={}, home="/home/nobody")


def node_object(job: Job, node: str, name: str, attempt: int, written_ns: int, ahead_ns: int = 0) -> bytes:
    """Return the object of a node whose ranks dumped at some time, by a clock that is ahead."""
    dumps = []
    for rank, dump in job.dumps(ranks=NODES[node]).items():
        for entry in dump["entries"]:
            for key in ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns"):
                if entry.get(key):
                    entry[key] += ahead_ns
        dumps.append(read_dump(pickle.dumps(dump, protocol=2), rank, mtime_ns=written_ns + ahead_ns, node=node))
    return record.encode(NodeRecords(name, attempt, node, tuple(map(with_accounts, dumps))), RECENT_CALLS)


def stalled_job(guilty: int = 2, calls: int = 1) -> Job:
    """Return a job in whose last call `guilty` never arrived."""
    job = Job(4)
    job.collective(job.world, times=calls)
    job.collective(job.world, by=job.world.without(guilty))
    return job


def healthy_job() -> Job:
    """Return a job that nobody is stuck in."""
    job = Job(4)
    job.collective(job.world, times=3)
    return job


def test_a_job_appears_with_its_first_record_and_has_one_verdict(fleet: Fleet) -> None:
    """The records of two nodes give the job's verdict, with the guilty rank and its node; then it is all known."""
    fleet.wait(2)
    assert fleet.jobs() == []

    fleet.publish(stalled_job(), name="team/llm 7")
    fleet.wait(4)

    state, diagnosis = fleet.state("team/llm 7"), fleet.diagnosis("team/llm 7")
    assert (diagnosis.verdict, diagnosis.partial, diagnosis.suspect_ranks) == ("hang", False, [2])
    assert [suspect.node for suspect in diagnosis.suspects] == ["n1"]
    assert (state.watch_up, state.backend, state.hang, state.scope) == (True, "polling", True, "job")
    assert state.path == f"file://{fleet.root}/team%2Fllm%207"
    assert fleet.counted("fr_incidents_total") == 1


def test_an_object_is_fetched_once_for_each_change(fleet: Fleet) -> None:
    """A poll that finds nothing new fetches nothing; a node that has news costs one request."""
    fleet.publish(stalled_job())
    fleet.wait(6)
    assert sorted(fleet.remote.reads) == ["llm/0/n0", "llm/0/n1"]

    fleet.publish(stalled_job(calls=2), "n1")
    fleet.wait(6)

    assert sorted(fleet.remote.reads) == ["llm/0/n0", "llm/0/n1", "llm/0/n1"]


def test_records_that_are_sent_again_are_no_news(fleet: Fleet) -> None:
    """A publisher that restarts sends what it sent before: the incident ends an hour after the dumps, not later."""
    data = {node: node_object(stalled_job(), node, "llm", 0, fleet.wall_ns()) for node in NODES}
    for node in NODES:
        fleet.put(data[node], node)
    fleet.wait(4)
    fleet.wait(3580)
    assert fleet.state().hang

    for node in NODES:
        fleet.put(data[node], node)
    fleet.wait(30)

    assert not fleet.state().hang
    assert [incident.closed_at_ns is not None for incident in fleet.store.snapshot().incidents] == [True]


def test_a_later_attempt_ends_what_was_before_it(fleet: Fleet) -> None:
    """None of its records counts, not even of ranks not yet there anew, and its incident ends with the next verdict."""
    fleet.publish(stalled_job(), attempt=9)
    fleet.wait(4)
    assert fleet.state().hang

    fleet.publish(healthy_job(), "n0", attempt=10)
    fleet.wait(4)

    diagnosis = fleet.diagnosis()
    assert (diagnosis.dumped_ranks, diagnosis.pending_ranks, diagnosis.stale_ranks) == ((0, 1), (2, 3), ())
    assert diagnosis.suspect_ranks == []
    fleet.publish(healthy_job(), "n1", attempt=10)
    fleet.wait(4)
    assert (fleet.diagnosis().verdict, fleet.state().hang) == ("healthy", False)


def test_a_job_that_is_counted_from_the_beginning_again(fleet: Fleet) -> None:
    """A job submitted anew under its name begins with attempt 0 again: that counts, as it is written to much later."""
    fleet.publish(stalled_job(guilty=3), attempt=5)
    fleet.wait(4)
    assert fleet.diagnosis().suspect_ranks == [3]

    fleet.wait(3600)
    fleet.publish(stalled_job(guilty=0, calls=2), attempt=0)
    fleet.wait(10)

    assert fleet.diagnosis().suspect_ranks == [0]


def test_what_a_former_attempt_sends_late_does_not_bring_it_back(fleet: Fleet) -> None:
    """A node whose store was down publishes dumps of attempt 0 when attempt 1 is long there: they are of the past."""
    fleet.wait(600)
    fleet.publish(stalled_job(guilty=3), attempt=1)
    fleet.wait(4)
    fleet.wait(300)
    fleet.publish(stalled_job(guilty=0), attempt=0, age_s=600)
    fleet.wait(10)

    assert fleet.diagnosis().suspect_ranks == [3]
    assert fleet.counted("fr_incidents_total") == 1


def test_attempts_are_looked_at_in_turn() -> None:
    """The largest at each poll, another one beside it; one that is emptied leaves its place to what was dumped last."""
    attempts = Attempts()
    seen = []
    for _ in range(4):
        looked_at = attempts.candidates([0, 1, 2, 9])
        for attempt in looked_at:
            attempts.judge(attempt, 10**12 - attempt)
        seen.append(looked_at)
    assert seen == [[9, 0], [9, 1], [9, 2], [9, 0]]
    assert (attempts.present, attempts.challenger) == (9, None)

    attempts.judge(9, None)
    assert (attempts.present, attempts.challenger) == (9, 0)
    attempts.judge_dumps(0, ("token",), 10**12)
    assert attempts.present == 0


def test_an_object_that_is_gone_takes_its_ranks_along(fleet: Fleet) -> None:
    """What a listing does not show any more is no evidence; when all are gone there is no verdict left."""
    fleet.publish(stalled_job())
    fleet.wait(4)
    (fleet.root / "llm/0/n0").unlink()
    fleet.wait(70)
    assert (fleet.diagnosis().dumped_ranks, fleet.diagnosis().missing_ranks) == ((2, 3), (0, 1))

    (fleet.root / "llm/0/n1").unlink()
    fleet.wait(4)

    assert fleet.jobs() == []


@pytest.mark.parametrize("place", ["", "llm", "llm/0"])
def test_a_listing_that_fails_ends_nothing(fleet: Fleet, place: str, caplog: pytest.LogCaptureFixture) -> None:
    """While the store denies, the incident stays open and the target is down, said once; then all goes on."""
    caplog.set_level(logging.INFO, "fr_exporter.fleet")
    fleet.publish(stalled_job())
    fleet.wait(4)
    fleet.remote.unlistable = {place}
    fleet.wait(20)
    assert (fleet.state().watch_up, fleet.state().hang) == (False, True)
    assert ("" in fleet.jobs()) == (place == "")

    fleet.remote.unlistable = set()
    fleet.publish(healthy_job())
    fleet.wait(4)

    assert (fleet.jobs(), fleet.state().watch_up, fleet.state().hang) == (["llm"], True, False)
    said = [entry for entry in caplog.records if entry.name == "fr_exporter.fleet.poller"]
    messages = [(entry.levelname, entry.getMessage()) for entry in said]
    assert messages == [
        ("WARNING", "cannot read records: Forbidden; trying again every 2 s until they can be read"),
        ("INFO", f"records in file://{fleet.root}{'/llm' * bool(place)} can be read again"),
    ]


def test_a_store_that_cannot_be_read_does_not_say_that_there_is_no_hang(
    tmp_path: Path, make_fleet: Callable[..., Fleet]
) -> None:
    """Without an incident `fr_hang` is unknown from the failure on, and before the first look."""
    fleet = make_fleet({"url": f"file://{tmp_path}/", "training_job": "llm"})
    fleet.worker.step()
    assert (fleet.state().watch_up, fleet.state().hang) == (False, None)

    fleet.publish(healthy_job())
    fleet.wait(4)
    assert (fleet.state().watch_up, fleet.state().hang) == (True, False)

    fleet.remote.unlistable = {"llm"}
    fleet.wait(2)
    assert (fleet.state().watch_up, fleet.state().hang) == (False, None)


def test_an_object_that_cannot_be_fetched_is_tried_again(fleet: Fleet) -> None:
    """It is named as unreadable beside the verdict over the other node, and forgotten when it comes."""
    fleet.remote.unreadable = {"llm/0/n1"}
    fleet.publish(stalled_job())
    fleet.wait(4)
    assert fleet.diagnosis().dumped_ranks == (0, 1)
    [unreadable] = fleet.diagnosis().unreadable_files
    assert (unreadable.file, unreadable.error) == (f"file://{fleet.root}/llm/0/n1", "cannot be fetched: Forbidden")
    assert unreadable.result == "unreadable"

    fleet.remote.unreadable = set()
    fleet.wait(4)

    assert fleet.diagnosis().unreadable_files == ()
    assert fleet.diagnosis().suspect_ranks == [2]


@pytest.mark.parametrize(("broken", "result"), [(b"", "partial"), (b"no record", "partial"), (None, "rejected")])
def test_a_broken_object_leaves_what_its_ranks_said_before(fleet: Fleet, broken: bytes | None, result: str) -> None:
    """It is named, and read again only when it changes; None stands for the object of another node under its name."""
    fleet.publish(stalled_job())
    fleet.wait(4)
    data = node_object(stalled_job(), "n0", "llm", 0, fleet.wall_ns()) if broken is None else broken
    path = fleet.put(data if broken is None else b"", "n1")
    if broken:
        path.write_bytes(broken)
        os.utime(path, ns=(fleet.wall_ns(), fleet.wall_ns()))
    fleet.wait(10)

    assert [unreadable.file for unreadable in fleet.diagnosis().unreadable_files] == [f"file://{path}"]
    assert [unreadable.result for unreadable in fleet.diagnosis().unreadable_files] == [result]
    assert fleet.diagnosis().dumped_ranks == (0, 1, 2, 3)
    assert fleet.diagnosis().suspect_ranks == [2]
    assert fleet.remote.reads.count("llm/0/n1") <= 2


def test_two_nodes_that_claim_a_rank_accuse_nobody(fleet: Fleet) -> None:
    """Nobody can know whose dump of rank 2 is right: it is unreadable, with both nodes named, until one gives in."""
    fleet.publish(healthy_job())
    job = stalled_job(guilty=0)
    dumps = [
        read_dump(pickle.dumps(dump, protocol=2), rank, mtime_ns=fleet.wall_ns(), node="spare")
        for rank, dump in job.dumps(ranks=(2,)).items()
    ]
    impostor = record.encode(NodeRecords("llm", 0, "spare", tuple(map(with_accounts, dumps))), RECENT_CALLS)
    path = fleet.put(impostor, "spare")
    fleet.wait(70)
    assert fleet.diagnosis().dumped_ranks == (0, 1, 3)
    assert [(each.rank, each.result) for each in fleet.diagnosis().unreadable_files] == [(2, "rejected")]
    assert "nodes n1 and spare" in fleet.diagnosis().unreadable_files[0].error
    assert fleet.diagnosis().verdict != "hang"

    path.unlink()
    fleet.wait(4)

    assert (fleet.diagnosis().verdict, fleet.diagnosis().dumped_ranks) == ("healthy", (0, 1, 2, 3))


def test_clocks_that_are_apart_do_not_matter(fleet: Fleet) -> None:
    """A node whose clock is five minutes ahead makes nobody stale and seems not of the future; a warning names it."""
    fleet.publish(stalled_job(), "n0", ahead_s=300.0)
    fleet.publish(stalled_job(), "n1")
    fleet.wait(4)
    assert fleet.diagnosis().dumped_ranks == (0, 1, 2, 3)
    assert fleet.diagnosis().suspect_ranks == [2]
    assert fleet.diagnosis().warnings == (
        "the clock of node n0 is 300 s ahead of that of the store; its times are corrected (rank 0 and 1 more)",
    )
    assert fleet.counted("fr_exporter_clock_offset_seconds") == 300


def test_a_volume_that_nodes_date_by_their_own_clocks(fleet: Fleet) -> None:
    """Where nothing tells that a clock is five minutes ahead, what lands now is of one set, whatever its times are."""
    fleet.wait(2)
    fleet.publish(stalled_job(), "n0")
    fleet.publish(stalled_job(), "n1", ahead_s=300.0)
    ahead_ns = fleet.wall_ns() + 300 * SECOND
    os.utime(fleet.root / "llm/0/n1", ns=(ahead_ns, ahead_ns))
    fleet.wait(4)

    assert (fleet.diagnosis().dumped_ranks, fleet.diagnosis().stale_ranks) == ((0, 1, 2, 3), ())
    assert (fleet.diagnosis().verdict, fleet.diagnosis().suspect_ranks) == ("hang", [2])


def test_a_clock_that_is_corrected_otherwise_opens_no_new_set(fleet: Fleet) -> None:
    """A node at the border between two steps sends again, and its times move by 30 s: that is the same dump still."""
    job = stalled_job()
    fleet.publish(job, "n1")
    fleet.publish(job, "n0", ahead_s=16.0)
    fleet.wait(4)
    incident, before = fleet.diagnosis().incident, fleet.diagnosis().ranks[0].dump_time_ns
    assert incident is not None

    fleet.publish(job, "n0", ahead_s=16.0, age_s=-1.0)
    uploaded_ns = fleet.wall_ns() + 2 * SECOND
    os.utime(fleet.root / "llm/0/n0", ns=(uploaded_ns, uploaded_ns))
    fleet.wait(4)

    assert (fleet.diagnosis().ranks[0].dump_time_ns or 0) > (before or 0) + 30 * SECOND
    assert (fleet.diagnosis().dumped_ranks, fleet.diagnosis().incident) == ((0, 1, 2, 3), incident)


@pytest.mark.parametrize("known_before", [False, True])
def test_what_comes_too_late_does_not_page(fleet: Fleet, known_before: bool) -> None:
    """Dumps of two hours ago, published only now, open no incident, be it at the first look or later."""
    if known_before:
        fleet.publish(healthy_job(), age_s=7300.0)
        fleet.wait(4)
        assert fleet.diagnosis().verdict == "healthy"
    fleet.publish(stalled_job(calls=5), age_s=7200.0)
    fleet.wait(4)

    assert (fleet.diagnosis().verdict, fleet.state().hang) == ("hang", False)
    assert fleet.store.snapshot().incidents == ()


def test_what_was_there_at_the_start_is_not_counted(fleet: Fleet) -> None:
    """An incident of before the start is shown and pages, and was counted by whoever saw it open."""
    fleet.publish(stalled_job(), age_s=60.0)
    fleet.wait(4)
    assert fleet.state().hang
    assert fleet.counted("fr_incidents_total") == 0


def test_jobs_of_the_past_cost_a_few_listings(fleet: Fleet) -> None:
    """A poll lists the live jobs and 16 of the others in turn, and a job that comes back is found when it is its turn.

    40 old jobs take three turns.
    """
    for number in range(40):
        fleet.publish(healthy_job(), "n0", name=f"old-{number}")
    fleet.seconds = 25 * 3600.0
    fleet.publish(stalled_job(), name="new")
    fleet.publish(stalled_job(guilty=0), name="newer")
    fleet.wait(2 * 3)
    assert fleet.jobs() == ["new", "newer"]

    for _ in range(5):
        fleet.remote.listings = 0
        fleet.wait(2)
        assert fleet.remote.listings <= 1 + 2 * (2 + 16)
    fleet.publish(stalled_job(), name="old-23")
    fleet.wait(2 * 3 + 2)

    assert fleet.jobs() == ["new", "newer", "old-23"]
    assert fleet.diagnosis("old-23").suspect_ranks == [2]


def test_jobs_that_were_never_looked_at_come_first() -> None:
    """At the start all of them are gone through in haste; a new one is probed before those known to be dormant."""
    discovery = Discovery(ttl_ns=10)
    names = [f"{number:02}" for number in range(20)]
    for _ in range(2):
        for name in discovery.candidates(names):
            discovery.judge(name, 0 if name != "19" else 90, now_ns=100)
    assert (discovery.live, discovery.in_haste) == (("19",), False)

    discovery.candidates(["new", *names])
    assert discovery.in_haste
    assert discovery.candidates(["new", *names])[:2] == ["19", "new"]


def test_a_job_is_forgotten_when_nothing_changed_for_its_ttl(fleet: Fleet) -> None:
    """A day after its newest record it is no job any more, and its records are still there."""
    fleet.publish(stalled_job())
    fleet.wait(4)
    fleet.seconds += 24 * 3600.0
    fleet.wait(2)
    assert fleet.jobs() == []
    assert (fleet.root / "llm/0/n0").exists()


def test_retention_removes_old_records_and_nothing_else(tmp_path: Path, make_fleet: Callable[..., Fleet]) -> None:
    """Of every job and attempt what is older goes, at the start and an hour later; files of others stay."""
    fleet = make_fleet({"url": f"file://{tmp_path}", "discover": True, "retention": "48h"})
    foreign = [tmp_path / "notes/today.txt", tmp_path / "llm/notes/n0", tmp_path / "readme"]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        os.utime(path, ns=(0, 0))
    fleet.publish(healthy_job(), attempt=0)
    fleet.publish(healthy_job(), "n0", attempt=1)
    fleet.publish(healthy_job(), name="other")
    fleet.seconds = 47 * 3600.0
    fleet.publish(healthy_job(), "n1", attempt=1)
    fleet.wait(20)
    assert len(records(tmp_path)) == 6

    fleet.wait(3700)

    assert records(tmp_path) == ["llm/1/n1"]
    assert all(path.exists() for path in foreign)


def records(root: Path) -> list[str]:
    """Return the records in a store."""
    return sorted(str(path.relative_to(root)) for path in root.glob("*/[0-9]*/*"))


def test_records_that_cannot_be_removed_are_told_once(
    tmp_path: Path, make_fleet: Callable[..., Fleet], caplog: pytest.LogCaptureFixture
) -> None:
    """A store that only lets itself be read costs one warning, and the verdict is there all the same."""
    fleet = make_fleet({"url": f"file://{tmp_path}", "training_job": "llm", "retention": "61m"})
    fleet.remote.is_read_only = True
    fleet.publish(stalled_job())
    fleet.wait(60)
    assert fleet.diagnosis().suspect_ranks == [2]
    fleet.wait(7300)
    [warning] = [entry for entry in caplog.records if entry.name == "fr_exporter.fleet.retention"]
    assert warning.getMessage().startswith(f"old records in file://{tmp_path} cannot be removed")


def test_a_reload_goes_on_with_the_stores_that_are_the_same(fleet: Fleet, tmp_path: Path) -> None:
    """Another poll interval fetches anew and changes nothing; other options read the job anew, with one incident."""
    url = f"file://{tmp_path}"
    fleet.publish(stalled_job())
    fleet.wait(4)
    [before] = fleet.store.snapshot().incidents

    for target in ({"discover": True, "world_size": 5}, {"training_job": "llm"}):
        reload(fleet, config({"url": url, **target}, watch={"poll_interval": "1s"}))
        fleet.wait(70)
        assert [incident.id for incident in fleet.store.snapshot().incidents] == [before.id]
        assert fleet.state().hang
    assert fleet.counted("fr_incidents_total") == 1
    reload(fleet, config({"path": str(tmp_path / "dumps"), "training_job": "other"}))

    assert fleet.jobs() == ["other"]
    assert fleet.worker._stores._pollers == {}


def reload(fleet: Fleet, new: Config) -> None:
    """Have the worker take in another configuration."""
    fleet.worker.reload(new, None)
    fleet.worker._receive(0.0)
    fleet.worker.step()


@contextmanager
def running(remote: WatchedStore, *targets: dict[str, Any]) -> Iterator[tuple[Worker, Store]]:
    """Run a worker in a thread, by the clocks of the system."""
    store = Store(history=10)
    worker = Worker(
        config(*targets, watch={"poll_interval": "100ms"}, dump_set={"settle": "100ms"}),
        None,
        store,
        Telemetry(CollectorRegistry()),
        open_store=lambda _: remote,
    )
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield worker, store
    finally:
        worker.stop()
        thread.join()


def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def suspects(store: Store, training_job: str) -> list[int] | None:
    """Return the suspects of a job, None while there is no diagnosis."""
    diagnoses = {state.training_job: state.diagnosis for state in store.snapshot().targets}
    diagnosis = diagnoses.get(training_job)
    return None if diagnosis is None else diagnosis.suspect_ranks


def test_a_store_that_hangs_does_not_delay_other_jobs(fleet: Fleet, tmp_path: Path) -> None:
    """While a store never answers, a directory has its verdict; when it does answer, so has the store."""
    fleet.publish(stalled_job(guilty=0))
    remote = WatchedStore(tmp_path)
    remote.hangs = threading.Event()
    (tmp_path / "dumps").mkdir()
    stalled_job().write(tmp_path / "dumps")
    targets = (
        {"url": f"file://{tmp_path}", "training_job": "llm"},
        {"path": str(tmp_path / "dumps"), "training_job": "local"},
    )
    with running(remote, *targets) as (_, store):
        until(lambda: suspects(store, "local") is not None)
        assert (suspects(store, "local"), suspects(store, "llm")) == ([2], None)
        remote.hangs.set()
        until(lambda: suspects(store, "llm") is not None)
        assert suspects(store, "llm") == [0]


def test_catching_up_looks_into_the_store_too(fleet: Fleet, tmp_path: Path) -> None:
    """What was published since the last poll is read and analysed before `done` is called."""
    remote = WatchedStore(tmp_path)
    verdicts: Queue[list[int] | None] = Queue()
    with running(remote, {"url": f"file://{tmp_path}", "training_job": "llm"}) as (worker, store):
        fleet.publish(stalled_job(guilty=1))
        worker.catch_up(lambda: verdicts.put(suspects(store, "llm")))
        assert verdicts.get(timeout=20) == [1]


def test_calls_that_hang_end_the_wait_and_never_pile_up() -> None:
    """Who waits is told after a while; further calls wait for those that hang, in no new threads, and then go on."""
    pool = Pool("s3://bucket", 3, patience_s=0.05)
    before = set(threading.enumerate())
    hang = threading.Event()
    for _ in range(3):
        with pytest.raises(StoreError, match=r"s3://bucket: no answer for 0\.05 s"):
            pool.results([hang.wait] * 8)
    assert len(set(threading.enumerate()) - before) == 3
    hang.set()
    assert pool.results([lambda: 1, lambda: 2]) == [1, 2]
    pool.close()


def test_batches_are_bounded_and_the_first_look_is_one(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects come in batches of at most 256 and 64 MiB; what was there at the start has one verdict all the same."""
    monkeypatch.setattr("fr_exporter.fleet.poller._BATCH_OBJECTS", 1)
    fleet.publish(stalled_job(), age_s=60.0)
    acts = []
    for poller in fleet.worker._stores._pollers.values():
        for act in poller.poll():
            acts.append(len(fleet.remote.reads))
            act()
            fleet.worker.step()
            partial = [state.diagnosis for state in fleet.store.snapshot().targets if state.diagnosis]
            assert len(fleet.remote.reads) == 2 or partial == []
    assert acts == [0, 0, 1, 2]
    assert fleet.diagnosis().suspect_ranks == [2]
