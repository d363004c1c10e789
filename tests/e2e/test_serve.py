"""`fr-exporter serve` as its users meet it: a process of its own, real files, real signals, HTTP."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders import Job
from tests.e2e.exporter import Config, serving, wait_until

pytestmark = pytest.mark.e2e

# Asks for 16 GiB, which the system would grant.
MEMORY_BOMB = b"\x80\x02]r\xff\xff\xff\x3f."


def watching(path: Path, **options: str) -> Config:
    """Return the configuration of one job called `job`, with short times."""
    return {
        "targets": [{"training_job": "job", "path": str(path)}],
        "watch": {"poll_interval": "200ms"},
        "dump_set": {"settle": "200ms", **options},
    }


@pytest.fixture
def gpu_error(shared_dumps: Path) -> Path:
    """Return the real set of 16 ranks whose ranks 12 and 14 lost their GPU."""
    return shared_dumps / "nvrx" / "gpu_error_1st"


def stalled_job(guilty: int = 2) -> Job:
    """Return a job of four ranks in whose last call `guilty` never arrived."""
    job = Job(4)
    job.collective(job.world)
    job.collective(job.world, by=job.world.without(guilty))
    return job


def write_now(job: Job, directory: Path) -> None:
    """Write the dumps of a job with the present as their mtime, as a running one does."""
    for rank, dump in job.dumps().items():
        (directory / f"_dump_{rank}").write_bytes(pickle.dumps(dump, protocol=2))


def test_sixteen_dumps_that_land_one_by_one(tmp_path: Path, dumps: Path, gpu_error: Path) -> None:
    """With the default times the whole verdict is on /metrics within two seconds of the last file."""
    with serving(tmp_path, {"targets": [{"training_job": "moe", "path": str(dumps)}]}) as exporter:
        assert exporter.value("fr_hang", training_job="moe") == 0
        for rank in range(16):
            shutil.copyfile(gpu_error / f"_dump_{rank}", dumps / f"_dump_{rank}")
        wait_until(lambda: exporter.values("fr_incident_info"), timeout=2)

        assert exporter.value("fr_hang", training_job="moe") == 1
        assert exporter.value("fr_suspect_ranks", cause="device_stall") == 2
        assert exporter.suspects() == {12, 14}
        assert exporter.value("fr_hung_process_group", process_group="74", operation="nccl:all_to_all") == 1
        progress = exporter.values("fr_rank_last_completed_seq_id")
        assert {int(labels["rank"]) for labels, _ in progress} == set(range(16))
        [(incident, _)] = exporter.values("fr_incident_info")
        assert (incident["suspects"], incident["process_group"], incident["seq_id"]) == ("12,14", "74", "20537")
        assert exporter.value("fr_incidents_total", cause="device_stall") == 1
        assert exporter.value("fr_exporter_detection_latency_seconds_count") == 16


class RunsCode:
    """A pickle of this creates a file when it is loaded carelessly."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


def test_hostile_dumps_are_rejected_and_the_others_analysed(tmp_path: Path, dumps: Path, gpu_error: Path) -> None:
    """A dump that would run code and one that asks for 16 GiB are named; the other 14 give the verdict."""
    marker = tmp_path / "code_was_run"
    with serving(tmp_path, watching(dumps, grace="1s")) as exporter:
        for rank in range(16):
            shutil.copyfile(gpu_error / f"_dump_{rank}", dumps / f"_dump_{rank}")
        (dumps / "_dump_3").write_bytes(pickle.dumps(RunsCode(marker)))
        (dumps / "_dump_5").write_bytes(MEMORY_BOMB)
        wait_until(lambda: exporter.value("fr_dump_set_ranks", state="unreadable") == 2)
        wait_until(lambda: exporter.value("fr_diagnosis_partial") == 0)

        assert not marker.exists()
        assert exporter.suspects() == {12, 14}
        assert exporter.value("fr_dump_set_ranks", state="dumped") == 14
        assert exporter.value("fr_exporter_dump_files_total", result="rejected") == 2
        named = {entry["file"] for entry in json.loads(exporter.get("/api/v1/diagnosis"))["unreadable_files"]}
        assert named == {str(dumps / "_dump_3"), str(dumps / "_dump_5")}


def test_a_half_written_file_ends_in_the_full_verdict(tmp_path: Path, dumps: Path) -> None:
    """A dump of which only half is there is named, and read again when it is complete."""
    with serving(tmp_path, watching(dumps)) as exporter:
        write_now(stalled_job(guilty=2), dumps)
        last = dumps / "_dump_3"
        whole = last.read_bytes()
        last.write_bytes(whole[: len(whole) // 2])
        wait_until(lambda: exporter.value("fr_dump_set_ranks", state="unreadable") == 1)
        assert exporter.value("fr_diagnosis_partial") == 1
        with last.open("ab") as writer:
            writer.write(whole[len(whole) // 2 :])

        wait_until(lambda: exporter.value("fr_diagnosis_partial") == 0)
        assert exporter.value("fr_dump_set_ranks", state="dumped") == 4
        assert exporter.value("fr_dump_set_ranks", state="unreadable") == 0
        assert exporter.suspects() == {2}


def test_a_dump_that_its_writer_never_closes_is_read(tmp_path: Path, dumps: Path) -> None:
    """A writer that hangs with its complete dump open holds the verdict up no longer than until the next listing."""
    config = watching(dumps)
    config["watch"]["rescan_interval"] = "1s"
    write_now(stalled_job(guilty=2), dumps)
    late = (dumps / "_dump_3").read_bytes()
    (dumps / "_dump_3").unlink()
    with serving(tmp_path, config) as exporter, (dumps / "_dump_3").open("wb", buffering=0) as writer:
        assert exporter.value("fr_diagnosis_partial") == 1
        writer.write(late)
        wait_until(lambda: exporter.value("fr_diagnosis_partial") == 0)
        assert exporter.suspects() == {2}


def test_a_directory_that_comes_and_goes(tmp_path: Path) -> None:
    """An absent directory is told once and shown; its dumps are read once it is there; going away ends no incident."""
    directory = tmp_path / "dumps"
    with serving(tmp_path, watching(directory)) as exporter:
        assert exporter.value("fr_exporter_watch_up", path=str(directory)) == 0
        directory.mkdir()
        write_now(stalled_job(guilty=1), directory)
        wait_until(lambda: exporter.suspects() == {1})
        assert exporter.value("fr_exporter_watch_up", path=str(directory)) == 1
        assert exporter.log().count("cannot watch") == 1

        directory.rename(tmp_path / "away")
        wait_until(lambda: exporter.value("fr_exporter_watch_up", path=str(directory)) == 0)
        assert exporter.value("fr_hang") == 1
        (tmp_path / "away").rename(directory)
        wait_until(lambda: exporter.value("fr_exporter_watch_up", path=str(directory)) == 1)
        assert exporter.log().count("cannot watch") == 2

        for file in directory.iterdir():
            file.unlink()
        wait_until(lambda: exporter.value("fr_hang") == 0)
        assert exporter.value("fr_verdict", verdict="none") == 1


def test_a_directory_that_cannot_be_read(tmp_path: Path, dumps: Path) -> None:
    """A directory without permission (for root, who may read all: a file in its place) is shown, and recovers."""

    def take_away() -> None:
        if os.geteuid() == 0:
            dumps.rename(tmp_path / "away")
            dumps.write_text("not a directory")
        else:
            dumps.chmod(0)

    def give_back() -> None:
        if os.geteuid() == 0:
            dumps.unlink()
            (tmp_path / "away").rename(dumps)
        else:
            dumps.chmod(0o755)

    with serving(tmp_path, watching(dumps)) as exporter:
        take_away()
        wait_until(lambda: exporter.value("fr_exporter_watch_up") == 0)
        assert exporter.log().count("cannot watch") == 1
        give_back()
        wait_until(lambda: exporter.value("fr_exporter_watch_up") == 1)
        write_now(stalled_job(guilty=3), dumps)
        wait_until(lambda: exporter.suspects() == {3})


def test_dumps_that_lay_there_at_start_up(tmp_path: Path, dumps: Path) -> None:
    """Dumps of a minute ago are diagnosed and open an incident, which does not count; those of yesterday open none."""
    yesterday = tmp_path / "yesterday"
    yesterday.mkdir()
    for directory, age_s in ((dumps, 60), (yesterday, 86_400)):
        write_now(stalled_job(), directory)
        for file in directory.iterdir():
            os.utime(file, (time.time() - age_s, time.time() - age_s))
    config = watching(dumps)
    config["targets"].append({"training_job": "old", "path": str(yesterday)})
    with serving(tmp_path, config) as exporter:
        hangs = {labels["training_job"]: value for labels, value in exporter.values("fr_hang")}
        assert hangs == {"job": 1, "old": 0}
        assert {labels["training_job"] for labels, _ in exporter.values("fr_incident_info")} == {"job"}
        assert all(value == 0 for _, value in exporter.values("fr_incidents_total"))
        assert exporter.value("fr_exporter_detection_latency_seconds_count") == 0
        verdicts = {labels["training_job"] for labels, value in exporter.values("fr_verdict", verdict="hang") if value}
        assert verdicts == {"job", "old"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_in_time(tmp_path: Path, dumps: Path, number: signal.Signals) -> None:
    """Without linger it exits with 0 in under two seconds, an incident open or not."""
    with serving(tmp_path, watching(dumps)) as exporter:
        write_now(stalled_job(), dumps)
        wait_until(lambda: exporter.value("fr_hang") == 1)
        exporter.process.send_signal(number)
        assert exporter.process.wait(timeout=2) == 0
        assert "Traceback" not in exporter.log()


def test_a_reload_changes_targets_and_a_bad_file_changes_nothing(tmp_path: Path, dumps: Path) -> None:
    """A bad file keeps the old configuration and shows it; a good one adds and drops jobs and leaves the rest alone."""
    other = tmp_path / "other"
    other.mkdir()
    with serving(tmp_path, watching(dumps)) as exporter:
        write_now(stalled_job(), dumps)
        wait_until(lambda: exporter.values("fr_incident_info"))
        good = exporter.config.read_text()

        exporter.config.write_text("targets: nonsense")
        exporter.process.send_signal(signal.SIGHUP)
        wait_until(lambda: exporter.value("fr_exporter_config_last_reload_successful") == 0)
        assert exporter.value("fr_hang", training_job="job") == 1
        assert exporter.log().count("the old configuration stays in force") == 1

        config = json.loads(good)
        config["targets"].append({"training_job": "second", "path": str(other)})
        exporter.config.write_text(json.dumps(config))
        exporter.process.send_signal(signal.SIGHUP)
        wait_until(lambda: exporter.value("fr_exporter_watch_up", training_job="second") == 1)
        assert exporter.value("fr_exporter_config_last_reload_successful") == 1
        assert exporter.value("fr_hang", training_job="job") == 1
        assert exporter.value("fr_exporter_dump_files_total", result="parsed") == 4

        del config["targets"][0]
        exporter.config.write_text(json.dumps(config))
        exporter.process.send_signal(signal.SIGHUP)
        wait_until(lambda: exporter.value("fr_hang", training_job="job") is None)
        assert not exporter.values("fr_incidents_total", training_job="job")
        assert exporter.value("fr_hang", training_job="second") == 0


def test_discovered_jobs_appear_and_go(tmp_path: Path) -> None:
    """Each sub-directory is a job of its name, as soon as it is there and no longer than that."""
    root = tmp_path / "jobs"
    root.mkdir()
    config = {**watching(root), "targets": [{"path": str(root), "discover": True}]}
    with serving(tmp_path, config) as exporter:
        assert not exporter.values("fr_hang")
        for name, guilty in (("first", 1), ("second", 2)):
            (root / name).mkdir()
            write_now(stalled_job(guilty), root / name)
        wait_until(lambda: len(exporter.values("fr_suspect_rank")) == 2)
        suspects = {labels["training_job"]: labels["rank"] for labels, _ in exporter.values("fr_suspect_rank")}
        assert suspects == {"first": "1", "second": "2"}
        assert exporter.value("fr_incidents_total", training_job="first", cause="host_stall") == 1

        shutil.rmtree(root / "first")
        wait_until(lambda: {labels["training_job"] for labels, _ in exporter.values("fr_hang")} == {"second"})


def test_with_linger_it_serves_until_the_verdict_was_scraped_twice(tmp_path: Path, dumps: Path) -> None:
    """Told to stop while the last rank's dump is still to come, it waits for it, and for two scrapes of the verdict."""
    job = stalled_job()
    with serving(tmp_path, {**watching(dumps), "web": {"shutdown_linger": "60s"}}) as exporter:
        write_now(job, dumps)
        late = (dumps / "_dump_0").read_bytes()
        (dumps / "_dump_0").unlink()
        wait_until(lambda: exporter.value("fr_diagnosis_partial") == 1)
        exporter.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "a second signal stops now" in exporter.log())
        for _ in range(3):
            assert exporter.value("fr_diagnosis_partial") == 1

        (dumps / "_dump_0").write_bytes(late)
        wait_until(lambda: json.loads(exporter.get("/api/v1/diagnosis"))["partial"] is False)
        assert exporter.process.poll() is None
        assert exporter.value("fr_hang") == 1
        exporter.get("/metrics")
        assert exporter.process.wait(timeout=5) == 0


def test_with_linger_a_second_signal_stops_at_once(tmp_path: Path, dumps: Path) -> None:
    """An operator who asks twice does not wait for scrapes."""
    with serving(tmp_path, {**watching(dumps), "web": {"shutdown_linger": "60s"}}) as exporter:
        write_now(stalled_job(), dumps)
        wait_until(lambda: exporter.value("fr_hang") == 1)
        exporter.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "a second signal stops now" in exporter.log())
        exporter.process.send_signal(signal.SIGTERM)
        assert exporter.process.wait(timeout=2) == 0


def test_with_linger_and_no_hang_it_stops_at_once(tmp_path: Path, dumps: Path) -> None:
    """Linger delays nothing where there is no verdict to wait for."""
    with serving(tmp_path, {**watching(dumps), "web": {"shutdown_linger": "60s"}}) as exporter:
        exporter.process.send_signal(signal.SIGTERM)
        assert exporter.process.wait(timeout=2) == 0


def test_dumps_that_land_with_the_signal_are_not_lost(tmp_path: Path, dumps: Path) -> None:
    """A sidecar is stopped when training exits, just after its dumps: with linger they are read and served first."""
    config = {**watching(dumps, settle="30s"), "web": {"shutdown_linger": "60s"}}
    with serving(tmp_path, config) as exporter:
        write_now(stalled_job(), dumps)
        exporter.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "a second signal stops now" in exporter.log())
        assert exporter.suspects() == {2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limits": {"max_memory": "16MiB"}}, "limits.max_memory"),
        ({"topology": {"hosts_file": "/nowhere/hosts"}}, "topology.hosts_file"),
        ({"web": {"listen": "{taken}"}}, "web.listen"),
        ({"targets": [{"url": "s4://bucket/fleet"}]}, "'s4' is no protocol of fsspec"),
        (
            {"publish": {"url": "s4://bucket/fleet", "training_job": "llm"}, "topology": {"node": "n"}},
            "'s4' is no protocol of fsspec",
        ),
    ],
)
def test_what_keeps_it_from_starting_is_one_line(tmp_path: Path, dumps: Path, change: Config, message: str) -> None:
    """A limit below what it needs, a hosts file that is not there, a port in use, no store: one line, exit code 2."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        text = json.dumps({"web": {"listen": "127.0.0.1:0"}, **watching(dumps), **change})
        (tmp_path / "config.yaml").write_text(text.replace("{taken}", f"127.0.0.1:{taken.getsockname()[1]}"))
        command = [sys.executable, "-m", "fr_exporter", "serve", "--config", str(tmp_path / "config.yaml")]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    assert ended.returncode == 2
    errors = [line for line in ended.stderr.splitlines() if " INFO " not in line]
    assert len(errors) == 1, ended.stderr
    assert message in errors[0]


def test_a_drill_raises_the_alarm_that_its_truth_calls_for(tmp_path: Path, dumps: Path) -> None:
    """`fr-exporter simulate` into a watched directory, file after file, gives a hang with the right suspects."""
    with serving(tmp_path, watching(dumps)) as exporter:
        drill = [sys.executable, "-m", "fr_exporter", "simulate", str(dumps), "--world-size", "8", "--seed", "1"]
        subprocess.run([*drill, "--write-delay", "0.05"], stdout=subprocess.DEVNULL, timeout=30, check=True)
        wait_until(lambda: exporter.value("fr_diagnosis_partial") == 0 and exporter.suspects())
        truth = json.loads((dumps / "truth.json").read_text())
        assert exporter.suspects() == set(truth["required"])
        assert exporter.value("fr_hang") == 1
        [(incident, _)] = exporter.values("fr_incident_info")
        assert incident["cause"] in truth["causes"]
