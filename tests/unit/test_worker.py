"""The worker: when it reads, when it analyses, what it keeps. Real files, polled; time is passed in."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from prometheus_client import CollectorRegistry

from fr_exporter.analysis import diagnose
from fr_exporter.config import Config, load
from fr_exporter.diagnosis import Diagnosis
from fr_exporter.metrics.telemetry import Telemetry
from fr_exporter.model import DumpSet, RankDump
from fr_exporter.parsing import DumpReader
from fr_exporter.store import Store, TargetState
from fr_exporter.worker import Worker, find_jobs
from tests.builders import SECOND, Job


@dataclass
class Clock:
    """A clock that moves when it is told to; files are written with its time as their mtime."""

    seconds: float = 0.0
    start_ns: int = field(default_factory=time.time_ns)

    def wall_ns(self) -> int:
        """Return the time since the epoch."""
        return self.start_ns + int(self.seconds * SECOND)


class Bench:
    """A worker on a bench: time passes in steps of a poll interval."""

    def __init__(self, *targets: dict[str, Any], hosts: tuple[str, ...] | None = None, **options: str) -> None:
        self.clock = Clock()
        self.store = Store(history=10)
        self.registry = CollectorRegistry()
        self.worker = Worker(
            config(*targets, **options),
            hosts,
            self.store,
            Telemetry(self.registry),
            clock=lambda: self.clock.seconds,
            wall_ns=self.clock.wall_ns,
        )
        self.worker.step()

    def write(self, directory: Path, job: Job, *ranks: int, name: str = "_dump_{rank}") -> None:
        """Write the dumps of some ranks now."""
        for rank, dump in job.dumps(ranks=ranks).items():
            path = directory / name.format(rank=rank)
            path.write_bytes(pickle.dumps(dump, protocol=2))
            os.utime(path, ns=(self.clock.wall_ns(), self.clock.wall_ns()))

    def wait(self, seconds: float) -> None:
        """Let time pass, and the worker do what is due meanwhile."""
        end = self.clock.seconds + seconds
        while self.clock.seconds < end:
            self.clock.seconds = min(self.clock.seconds + 0.25, end)
            self.worker.step()

    def call(self, act: Callable[[], None]) -> None:
        """Put a message in the worker's inbox and have it taken in."""
        act()
        self.worker._receive(0.0)
        self.worker.step()

    def state(self, training_job: str = "job") -> TargetState:
        """Return what the store holds of a job."""
        return {state.training_job: state for state in self.store.snapshot().targets}[training_job]

    def diagnosis(self, training_job: str = "job") -> Diagnosis:
        """Return a job's diagnosis."""
        found = self.state(training_job).diagnosis
        assert found is not None
        return found

    def counted(self) -> float:
        """Return the number of incidents counted."""
        return sum(
            sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == "fr_incidents_total"
        )


def config(*targets: dict[str, Any], poll_interval: str = "250ms", **dump_set: str) -> Config:
    """Return a configuration that polls."""
    document = {
        "targets": list(targets),
        "watch": {"backend": "polling", "poll_interval": poll_interval},
        "dump_set": {"settle": "1s", "grace": "60s", **dump_set},
    }
    return load(json.dumps(document), env={}, home="/home/nobody")


def target(path: Path, training_job: str = "job", **keys: object) -> dict[str, Any]:
    """Return a target of the configuration."""
    return {"training_job": training_job, "path": str(path), **keys}


def stalled_job(world_size: int = 4, guilty: int = 2) -> Job:
    """Return a job in whose last call `guilty` never arrived."""
    job = Job(world_size)
    job.collective(job.world)
    job.collective(job.world, by=job.world.without(guilty))
    return job


def test_reading_gets_as_much_time_as_the_analysis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an analysis takes 10 s, the next one waits as long: the files of thousands of ranks are read meanwhile."""
    bench = Bench(target(tmp_path))
    analysed: list[tuple[float, int]] = []

    def slowly(dump_set: DumpSet, **options: Any) -> Diagnosis:
        analysed.append((bench.clock.seconds, len(dump_set.dumps)))
        bench.clock.seconds += 10
        return diagnose(dump_set, **options)

    monkeypatch.setattr("fr_exporter.pipeline.diagnose", slowly)
    job = Job(8)
    job.collective(job.world, by=job.world.without(3))
    for rank in range(7):
        bench.write(tmp_path, job, rank)
        bench.wait(4)

    first, second = analysed[:2]
    assert second[0] - first[0] >= 20
    assert second[1] - first[1] > 1


def test_files_that_keep_landing_do_not_put_the_verdict_off(tmp_path: Path) -> None:
    """With a file every half second and a settling time of one, there is a verdict before the files end."""
    bench = Bench(target(tmp_path))
    job = stalled_job(world_size=16, guilty=15)
    seen = []
    for rank in range(14):
        bench.write(tmp_path, job, rank)
        bench.wait(0.5)
        diagnosis = bench.state().diagnosis
        seen.append(0 if diagnosis is None else len(diagnosis.dumped_ranks))

    assert seen[2] > 0
    assert seen[-1] >= 12
    assert bench.diagnosis().partial


def test_the_last_rank_is_not_waited_for(tmp_path: Path) -> None:
    """Once the last pending rank has dumped there is nothing to settle: the verdict is final at once."""
    bench = Bench(target(tmp_path), settle="10s")
    bench.write(tmp_path, stalled_job(), 0, 1, 2)
    bench.wait(11)
    assert bench.diagnosis().pending_ranks == (3,)

    bench.write(tmp_path, stalled_job(), 3)
    bench.wait(0.25)

    assert not bench.diagnosis().partial
    assert bench.state().incident is not None


def test_a_rank_that_never_dumps_is_missing_when_the_grace_ends(tmp_path: Path) -> None:
    """Nothing changes on disk, and still the verdict becomes final when the grace is over."""
    bench = Bench(target(tmp_path), grace="60s")
    bench.write(tmp_path, stalled_job(guilty=3), 0, 1, 2)
    bench.wait(59)
    assert bench.diagnosis().pending_ranks == (3,)
    assert bench.counted() == 0

    bench.wait(2)

    assert bench.diagnosis().missing_ranks == (3,)
    assert bench.diagnosis().suspect_ranks == [3]
    assert bench.counted() == 1


def test_an_incident_ends_with_its_ttl(tmp_path: Path) -> None:
    """An hour after the last file the incident is over, though its files lie there still."""
    bench = Bench(target(tmp_path))
    bench.write(tmp_path, stalled_job(), 0, 1, 2, 3)
    bench.wait(2)
    assert bench.state().hang

    bench.clock.seconds += 3590
    bench.wait(0.25)
    assert bench.state().hang
    bench.wait(12)

    assert not bench.state().hang
    assert bench.diagnosis().verdict == "hang"
    assert [incident.closed_at_ns is not None for incident in bench.store.snapshot().incidents] == [True]


def test_the_next_incident_replaces_the_last(tmp_path: Path) -> None:
    """A rewrite with newer calls is another incident, under another name."""
    bench = Bench(target(tmp_path))
    bench.write(tmp_path, stalled_job(guilty=2), 0, 1, 2, 3)
    bench.wait(2)
    later = Job(4)
    later.collective(later.world, times=3)
    later.collective(later.world, by=later.world.without(1))
    bench.write(tmp_path, later, 0, 1, 2, 3)
    bench.wait(2)

    newest, first = bench.store.snapshot().incidents
    assert (newest.closed_at_ns, first.closed_at_ns is None) == (None, False)
    assert newest.diagnosis.suspect_ranks == [1]
    assert bench.counted() == 2


def test_removed_files_end_the_incident_and_an_unmounted_directory_does_not(tmp_path: Path) -> None:
    """Files are gone where their directory says so; an empty directory of another device says nothing."""
    other_device = Path("/dev/shm")
    if not other_device.is_dir() or other_device.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system to stand for an unmounted one")
    mounted, mount_point = tmp_path / "mounted", tmp_path / "dumps"
    mounted.mkdir()
    mount_point.symlink_to(mounted)
    bench = Bench(target(mount_point))
    bench.write(mounted, stalled_job(), 0, 1, 2, 3)
    bench.wait(2)
    empty = other_device / f"fr_exporter_{os.getpid()}"
    empty.mkdir()
    try:
        mount_point.unlink()
        mount_point.symlink_to(empty)
        bench.wait(3)
        assert bench.state().hang
    finally:
        empty.rmdir()
    bench.wait(3)
    assert (bench.state().hang, bench.state().watch_up) == (True, False)
    mount_point.unlink()
    mount_point.symlink_to(mounted)
    bench.wait(3)
    assert (bench.state().hang, bench.state().watch_up) == (True, True)

    for file in mounted.iterdir():
        file.unlink()
    bench.wait(3)

    assert not bench.state().hang
    assert bench.state().diagnosis is None


def test_a_file_that_the_system_fails_to_read_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An I/O error may pass without a change of the file: the next look reads it."""
    original = DumpReader.read
    failures = [OSError(5, "Input/output error"), OSError(5, "Input/output error")]

    def fails_twice(self: DumpReader, file: BinaryIO, **facts: Any) -> RankDump:
        if facts["rank"] == 3 and failures:
            raise failures.pop()
        return original(self, file, **facts)

    monkeypatch.setattr(DumpReader, "read", fails_twice)
    bench = Bench(target(tmp_path))
    bench.write(tmp_path, stalled_job(), 0, 1, 2, 3)
    bench.wait(0.25)
    assert failures == failures[:1]

    bench.wait(3)

    assert bench.diagnosis().dumped_ranks == (0, 1, 2, 3)
    assert bench.diagnosis().unreadable_files == ()


def test_a_file_is_read_once_for_each_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is not read again for an event, a listing, or the return of its directory: only when it changed."""
    reads: list[int] = []
    original = DumpReader.read

    def counted(self: DumpReader, file: BinaryIO, **facts: Any) -> RankDump:
        reads.append(facts["rank"])
        return original(self, file, **facts)

    monkeypatch.setattr(DumpReader, "read", counted)
    directory = tmp_path / "dumps"
    directory.mkdir()
    bench = Bench(target(directory))
    bench.clock.seconds -= 60
    bench.write(directory, stalled_job(), 0, 1, 2, 3)
    bench.clock.seconds += 60
    bench.wait(5)
    directory.rename(tmp_path / "away")
    bench.wait(1)
    (tmp_path / "away").rename(directory)
    bench.write(directory, stalled_job(), 2)
    bench.wait(5)
    bench.call(lambda: bench.worker._inbox.put(str(directory / "_dump_1")))

    assert sorted(reads) == [0, 1, 2, 2, 3]


def test_two_jobs_may_share_a_directory(tmp_path: Path) -> None:
    """Prefixes tell their files apart."""
    bench = Bench(
        {"training_job": "a", "prefix": str(tmp_path / "a_rank_")},
        {"training_job": "b", "prefix": str(tmp_path / "b_rank_")},
    )
    bench.write(tmp_path, stalled_job(guilty=0), 0, 1, 2, 3, name="a_rank_{rank}")
    bench.write(tmp_path, stalled_job(guilty=3), 0, 1, 2, 3, name="b_rank_{rank}")
    bench.wait(2)

    assert bench.diagnosis("a").suspect_ranks == [0]
    assert bench.diagnosis("b").suspect_ranks == [3]


def test_a_fault_in_one_job_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the analysis of one job raises, the other job has its verdict all the same."""

    def fails_for_bad(dump_set: DumpSet, **options: int) -> Diagnosis:
        if dump_set.training_job == "bad":
            raise ZeroDivisionError
        return diagnose(dump_set, **options)

    monkeypatch.setattr("fr_exporter.pipeline.diagnose", fails_for_bad)
    for name in ("bad", "good"):
        (tmp_path / name).mkdir()
    bench = Bench(target(tmp_path / "bad", "bad"), target(tmp_path / "good", "good"))
    for name in ("bad", "good"):
        bench.write(tmp_path / name, stalled_job(), 0, 1, 2, 3)
    bench.wait(2)

    assert bench.diagnosis("good").suspect_ranks == [2]
    assert bench.state("bad").diagnosis is None


def test_a_reload_that_changes_a_job_starts_it_anew_without_counting_twice(tmp_path: Path) -> None:
    """With other options the same files are read anew: the incident keeps its name and is counted once."""
    bench = Bench(target(tmp_path))
    bench.write(tmp_path, stalled_job(), 0, 1, 2, 3)
    bench.wait(2)
    [before] = bench.store.snapshot().incidents

    bench.call(lambda: bench.worker.reload(config(target(tmp_path, world_size=5), grace="5s"), None))
    bench.wait(6)

    assert bench.diagnosis().missing_ranks == (4,)
    assert [incident.id for incident in bench.store.snapshot().incidents] == [before.id]
    assert bench.counted() == 1


def test_a_new_job_is_read_at_once_where_its_directory_is_watched_already(tmp_path: Path) -> None:
    """A target that a reload adds does not wait until its directory is due to be listed again."""
    first = {"training_job": "a", "prefix": str(tmp_path / "a_rank_")}
    second = {"training_job": "b", "prefix": str(tmp_path / "b_rank_")}
    bench = Bench(first, poll_interval="1h")
    bench.write(tmp_path, stalled_job(), 0, 1, 2, 3, name="b_rank_{rank}")
    bench.clock.seconds += 1

    bench.call(lambda: bench.worker.reload(config(first, second, poll_interval="1h"), None))

    assert bench.diagnosis("b").suspect_ranks == [2]


def test_catching_up_waits_for_nothing(tmp_path: Path) -> None:
    """Files that landed since the last look are read and analysed before `done` is called."""
    bench = Bench(target(tmp_path), settle="30s")
    bench.write(tmp_path, stalled_job(), 0, 1, 2, 3)
    verdicts = []

    bench.call(lambda: bench.worker.catch_up(lambda: verdicts.append(bench.diagnosis().suspect_ranks)))

    assert verdicts == [[2]]


def test_discovered_jobs_follow_their_directories(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A sub-directory is a job while it is there, and may go; a name that is taken is told, and not watched twice."""
    taken = tmp_path / "elsewhere"
    for directory in (taken, tmp_path / "jobs" / "one", tmp_path / "jobs" / "taken"):
        directory.mkdir(parents=True)
    bench = Bench(target(taken, "taken"), {"path": str(tmp_path / "jobs"), "discover": True})
    assert [state.path for state in bench.store.snapshot().targets] == [str(tmp_path / "jobs" / "one"), str(taken)]

    bench.write(tmp_path / "jobs" / "one", stalled_job(), 0, 1, 2, 3)
    bench.wait(2)
    assert bench.state("one").hang
    shutil.rmtree(tmp_path / "jobs" / "one")
    (tmp_path / "jobs" / "two").mkdir()
    bench.wait(1)

    assert {state.training_job for state in bench.store.snapshot().targets} == {"taken", "two"}
    assert [incident.closed_at_ns is not None for incident in bench.store.snapshot().incidents] == [True]
    warnings = [record.getMessage() for record in caplog.records if "hang: " not in record.getMessage()]
    assert warnings == [f"{tmp_path / 'jobs' / 'taken'} is not watched: there is another training job of that name"]


def test_a_suspect_without_a_dump_is_on_the_node_that_the_hosts_file_names(tmp_path: Path) -> None:
    """A lost node leaves nothing that names it, and the page must name it; a rank beyond the file is nowhere."""
    for hosts, node in ((("n0", "n0", "n1", "n1"), "n1"), (("n0", "n0", "n1"), None)):
        bench = Bench(target(tmp_path), hosts=hosts, grace="5s")
        job = Job(4)
        job.collective(job.world, by=job.world.without(3))
        bench.write(tmp_path, job, 0, 1, 2)
        bench.wait(10)
        assert [(suspect.rank, suspect.node) for suspect in bench.diagnosis().suspects] == [(3, node)]


def test_a_directory_that_was_never_seen_says_nothing_of_a_hang(tmp_path: Path) -> None:
    """Whether there is one is unknown until its files were looked at; once they were, losing it changes nothing."""
    bench = Bench(target(tmp_path / "dumps"))
    assert (bench.state().watch_up, bench.state().hang) == (False, None)

    (tmp_path / "dumps").mkdir()
    bench.wait(1)
    assert (bench.state().watch_up, bench.state().hang) == (True, False)

    (tmp_path / "dumps").rmdir()
    bench.wait(1)
    assert (bench.state().watch_up, bench.state().hang) == (False, False)


def test_a_directory_of_jobs_that_is_absent_is_shown(tmp_path: Path) -> None:
    """No job could tell that the directory above them cannot be watched; it has a state of its own until it can."""
    bench = Bench({"path": str(tmp_path / "jobs"), "discover": True})
    [state] = bench.store.snapshot().targets
    assert (state.path, state.watch_up) == (str(tmp_path / "jobs"), False)

    (tmp_path / "jobs").mkdir()
    bench.wait(1)

    assert bench.store.snapshot().targets == ()


def test_a_job_is_forgotten_when_nothing_changed_for_its_ttl(tmp_path: Path) -> None:
    """A change is a file that comes or goes in the directory, or a dump that is rewritten in place."""
    hour_ns = 3600 * SECOND
    now_ns = 1_800_000_000 * SECOND
    ages = {"old": (30, 30), "new": (2, 30), "rewritten": (30, 2), ".hidden": (0, 0)}
    for name, (directory_age, file_age) in ages.items():
        directory = tmp_path / name
        directory.mkdir()
        (directory / "_dump_0").write_bytes(b"")
        os.utime(directory / "_dump_0", ns=(0, now_ns - file_age * hour_ns))
        os.utime(directory, ns=(0, now_ns - directory_age * hour_ns))
    (tmp_path / "file").write_bytes(b"")
    [root] = config({"path": str(tmp_path), "discover": True, "discover_ttl": "24h"}).targets

    found = find_jobs(str(tmp_path), root, now_ns)

    assert found == [str(tmp_path / "new"), str(tmp_path / "rewritten")]


def test_a_link_to_a_job_is_no_other_job(tmp_path: Path) -> None:
    """A hang behind `latest` would page twice; a directory that lies elsewhere is a job by the name of its link."""
    root = tmp_path / "jobs"
    for directory in (root / "run-7", tmp_path / "elsewhere"):
        directory.mkdir(parents=True)
    for link in ("latest", "z-latest"):
        (root / link).symlink_to("run-7")
    (root / "far").symlink_to(tmp_path / "elsewhere")
    (root / "dangling").symlink_to("nowhere")
    [target] = config({"path": str(root), "discover": True}).targets

    assert find_jobs(str(root), target, time.time_ns()) == [str(root / "far"), str(root / "run-7")]
