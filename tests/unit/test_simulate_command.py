"""`fr-exporter simulate`: what it writes, when, and what it refuses."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fr_exporter import Diagnosis, analyze_dumps
from fr_exporter.cli import main
from fr_exporter.parsing import pickle_safe
from fr_exporter.simulate import FAULTS, Injection, Plan, Sizes, Truth, command, simulate
from fr_exporter.simulate.writer import Output, write_job

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "simulate.md"
SMALL = ("--tensor", "1", "--pipeline", "1")
Capture = pytest.CaptureFixture[str]


def truth_in(directory: Path) -> dict[str, Any]:
    """Return what `truth.json` says."""
    truth: dict[str, Any] = json.loads((directory / "truth.json").read_text())
    return truth


def read(file: Path) -> Any:
    """Return the content of a dump file, pickle or JSON."""
    if file.suffix == ".json":
        return json.loads(file.read_text())
    with file.open("rb") as stream:
        return pickle_safe.load(stream)


def names_in(directory: Path) -> set[str]:
    """Return the names of all files there."""
    return {path.name for path in directory.iterdir()}


def assert_right(diagnosis: Diagnosis, truth: dict[str, Any]) -> None:
    """Compare a diagnosis with the truth of a decidable case."""
    assert truth["decidable"]
    assert (diagnosis.verdict, list(diagnosis.suspect_ranks)) == (truth["verdict"], truth["required"])


@pytest.mark.parametrize(("fault", "dumped"), [("host_stall:3", 16), ("killed:5", 15), ("healthy", 16)])
def test_a_drill_is_diagnosed_as_its_truth_says(tmp_path: Path, fault: str, dumped: int, capsys: Capture) -> None:
    """The directory, made with its parents, holds the dumps and the truth alone; the output names the next step."""
    out = tmp_path / "made" / "drill"
    assert main(["simulate", str(out), "--fault", fault]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert 2 <= len(printed.out.splitlines()) <= 4
    assert printed.out.endswith(f"fr-exporter analyze {out}\n")
    name, _, ranks = fault.partition(":")
    truth = truth_in(out)
    assert truth["faults"][0]["name"] == name
    assert truth["required"] == [int(rank) for rank in ranks.split(",") if rank]
    absent = set() if dumped == 16 else {5}
    assert names_in(out) == {"truth.json"} | {f"_dump_{rank}" for rank in range(16) if rank not in absent}
    assert_right(analyze_dumps(str(out)), truth)


def test_the_next_step_runs_as_it_is_printed(tmp_path: Path, capsys: Capture) -> None:
    """Spaces in the directory and a prefix that looks like an option do not mislead whoever pastes the line."""
    assert main(["simulate", str(tmp_path / "my drill"), *SMALL, "--prefix=-x _"]) == 0
    command_line = capsys.readouterr().out.splitlines()[-1].removeprefix("Try: fr-exporter ")
    assert main(shlex.split(command_line)) == 1


def test_what_dumps_cannot_tell_is_said(tmp_path: Path, capsys: Capture) -> None:
    """Of two ranks that disagree either may be wrong; the output says so, and names both."""
    assert main(["simulate", str(tmp_path), "--data", "1", "--fault", "mismatch_size:2"]) == 0
    out = capsys.readouterr().out
    assert "\nA right verdict names some of ranks 2-3.\nDumps cannot tell more: two ranks that disagree" in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--world-size", "10"], "--world-size 10: is not divisible by tensor × pipeline × context = 4"),
        (["--world-size", "16", "--data", "2"], "--world-size 16: the sizes given make 8 ranks"),
        (["--world-size", "32768"], "a job has 2 to 16384 ranks, not 32768"),
        (["--expert", "3"], "expert-parallel size 3 does not divide data × context = 4"),
        (["--tensor", "0"], "argument --tensor: must be a whole number from 1, not '0'"),
        (["--data", "9" * 5000], "argument --data: must be a whole number from 1, not '999"),
        (["--fault", "gremlins"], "unknown fault 'gremlins'; choose from host_stall, "),
        (["--fault", "host_stall:16"], "ranks '16': 16 is no range of ranks in a job of 16"),
        (["--fault", "host_stall:0-999999999999"], "is no range of ranks in a job of 16"),
        (["--fault", "host_stall:"], "ranks '': write them as 3,7 or 0-2"),
        (["--fault", "host_stall:7-3"], "7-3 is no range of ranks"),
        (["--fault", "missing_send", "--pipeline", "1"], "missing_send cannot befall a job of these sizes"),
        (["--fault", "node_lost", "--ranks-per-node", "16"], "all 16 ranks are on the one node"),
        (["--format", "json", "--dump-version", "none"], "dumps without a version are pickles"),
        (["--dump-version", "3.0"], "argument --dump-version: invalid choice: '3.0'"),
        (["--prefix", "dump1"], "prefix 'dump1': must be printable, not end in a digit"),
        (["--prefix", "../dump"], "prefix '../dump': must be printable, not end in a digit, nor hold /"),
        (["--prefix", "a\nb"], "prefix 'a\\nb': must be printable"),
        (["--write-delay", "nan"], "argument --write-delay: must be 0 to 86400 seconds, not 'nan'"),
        (["--follow", "soon"], "argument --follow: must be 0 to 86400 seconds, not 'soon'"),
    ],
)
def test_a_bad_argument_is_one_line_and_writes_nothing(
    tmp_path: Path, arguments: list[str], line: str, capsys: Capture
) -> None:
    """A mistake ends in exit code 2 and one line that says what it is; not even the directory is made."""
    assert main(["simulate", str(tmp_path / "drill"), *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert line in err
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_take_it_is_left_alone(tmp_path: Path, capsys: Capture) -> None:
    """A file in its place or above it, a dangling link and a directory in use are refused, and stay as they are."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes").write_text("mine")
    for out, why in (
        ("file", "is not a directory"),
        ("file/below/it", "is not a directory"),
        ("link", "is not a directory"),
        ("used", "is not empty"),
    ):
        assert main(["simulate", str(tmp_path / out)]) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        assert why in printed.err
    assert main(["simulate", ""]) == 2
    assert names_in(tmp_path) == {"file", "link", "used"}
    assert names_in(tmp_path / "used") == {"notes"}


@pytest.mark.skipif(sys.platform != "linux", reason="needs a directory that even root may not write to")
def test_a_directory_without_permission_is_refused(capsys: Capture) -> None:
    """Where the directory cannot be made, the line says so before anything is tried."""
    assert main(["simulate", "/proc/1/drill"]) == 2
    assert "/proc/1: no permission to write here" in capsys.readouterr().err


def test_force_writes_over_an_earlier_drill(tmp_path: Path) -> None:
    """Dumps and truth are those of the last run, the dump of a rank that died since is gone, and other files stay."""
    (tmp_path / "notes").write_text("mine")
    assert main(["simulate", str(tmp_path), *SMALL, "--force"]) == 0
    assert main(["simulate", str(tmp_path), *SMALL, "--force", "--fault", "killed:2"]) == 0
    assert names_in(tmp_path) == {"notes", "truth.json", "_dump_0", "_dump_1", "_dump_3"}
    assert (tmp_path / "notes").read_text() == "mine"
    assert_right(analyze_dumps(str(tmp_path)), truth_in(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "name", "holds"),
    [
        (["--ring", "5"], "_dump_0", lambda dump: len(dump["entries"]) == 5),
        (["--only-active"], "_dump_0", lambda dump: all(entry["state"] != "completed" for entry in dump["entries"])),
        (["--timing"], "_dump_0", lambda dump: any(entry["time_discovered_started_ns"] for entry in dump["entries"])),
        (["--no-frames"], "_dump_0", lambda dump: all("frames" not in entry for entry in dump["entries"])),
        (["--prefix", "rank_", "--format", "json"], "rank_3.json", lambda dump: dump["version"] == "2.10"),
        (["--dump-version", "2.4"], "_dump_0", lambda dump: dump["version"] == "2.4"),
        (["--dump-version", "none"], "_dump_0", lambda dump: isinstance(dump, list)),
        (["--expert", "2"], "_dump_0", lambda dump: "EXPERT_MODEL_PARALLEL_GROUP" in str(dump["pg_config"])),
        (["--context", "2"], "_dump_7", lambda dump: "CONTEXT_PARALLEL_GROUP" in str(dump["pg_config"])),
        (["--world-size", "6"], "_dump_5", lambda dump: dump["pg_config"]["0"]["ranks"] == "[0, 1, 2, 3, 4, 5]"),
    ],
)
def test_an_option_shows_in_the_dumps(
    tmp_path: Path, arguments: list[str], name: str, holds: Callable[[Any], bool]
) -> None:
    """Each option changes what is written in the way that it says; `host_stall` leaves every rank with a dump."""
    assert main(["simulate", str(tmp_path / "drill"), *SMALL, *arguments]) == 0
    assert holds(read(tmp_path / "drill" / name))


def times_in(dump: dict[str, Any]) -> list[int]:
    """Return every time in a dump, nanoseconds since the epoch."""
    keys = ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns")
    return [entry[key] for entry in dump["entries"] for key in keys if entry[key] is not None]


@pytest.mark.parametrize("fault", ["host_stall", "healthy"])
def test_files_land_one_after_another_and_look_fresh(tmp_path: Path, fault: str) -> None:
    """With a minute between files no dump tells of the future.

    The calls of a hang are ten minutes old when the first file lands; those of a job that goes on are new in each file.
    """
    job = simulate(Plan(Sizes(data=4), (Injection(fault),), seed=1))
    start_ns = now_ns = 1_790_000_000_000_000_000
    landed: list[set[str]] = []

    def sleep(seconds: float) -> None:
        nonlocal now_ns
        landed.append(names_in(tmp_path))
        now_ns += int(seconds * 1e9)

    write_job(job, Output(tmp_path, write_delay_s=60), clock=lambda: now_ns, sleep=sleep)

    assert [len(names) for names in landed] == [1, 2, 3]
    assert "truth.json" not in set().union(*landed)
    assert names_in(tmp_path) - landed[-1] >= {"truth.json"}
    order = sorted(job.moments, key=lambda rank: job.moments[rank])
    for number, rank in enumerate(order):
        newest_ns = max(times_in(read(tmp_path / f"_dump_{rank}")))
        written_ns = start_ns + number * 60_000_000_000
        if fault == "healthy":
            assert 0 <= written_ns - newest_ns < 5_000_000_000
        else:
            assert 590 <= (start_ns - newest_ns) / 1e9 <= 610


def test_following_alternates_between_health_and_new_incidents(tmp_path: Path) -> None:
    """Each round stands complete during its pause: healthy, a hang, healthy, another hang; then Ctrl-C ends it."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    arguments = parser.parse_args([str(tmp_path), *SMALL, "--follow", "150", "--seed", "3"])
    truths: list[dict[str, Any]] = []

    def sleep(seconds: float) -> None:
        assert seconds == 150
        truths.append(truth_in(tmp_path))
        assert_right(analyze_dumps(str(tmp_path)), truths[-1])
        if len(truths) == 4:
            raise KeyboardInterrupt

    command.run(arguments, write=lambda _: None, clock=time.time_ns, sleep=sleep)
    assert [truth["verdict"] for truth in truths] == ["healthy", "hang", "healthy", "hang"]
    assert [truth["seed"] for truth in truths] == [3, 3, 4, 4]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("option", "awaited", "code"), [("--follow", "truth.json", 0), ("--write-delay=60", "_dump_*", 130)]
)
def test_ctrl_c_ends_it_quietly(tmp_path: Path, option: str, awaited: str, code: int) -> None:
    """Ctrl-C is how a drill that goes on ends (0), and an interruption in the middle of writing (130)."""
    arguments = [sys.executable, "-m", "fr_exporter", "simulate", str(tmp_path), *SMALL, option]
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 30
        while not any(tmp_path.glob(awaited)) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (code, b"")


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """Where a file cannot take its content, the exit code is 4, one line says so, and there is no truth."""
    limited = f'ulimit -f 1 && exec "{sys.executable}" -m fr_exporter simulate "{tmp_path}/drill"'
    ended = subprocess.run(["/bin/sh", "-c", limited], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (4, "")
    assert re.fullmatch(r"fr-exporter: error: .*/drill: cannot write: .+\n", ended.stderr)
    assert "truth.json" not in names_in(tmp_path / "drill")


def table(heading: str) -> dict[str, str]:
    """Return the first two columns of the first table under a heading of the document."""
    section = DOCUMENT.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]*) \|", section, re.MULTILINE)
    return {name.split(" ")[0]: text for name, text in rows}


def test_the_document_lists_every_fault_option_and_key() -> None:
    """docs/simulate.md is complete: each fault with its summary, each option of the command, each key of the truth."""
    assert table("Faults") == {fault.name: fault.summary for fault in FAULTS.values()}
    assert set(table("truth.json")) == {field.name for field in fields(Truth)}
    parser = argparse.ArgumentParser(add_help=False)
    command.add_arguments(parser)
    assert set(table("Options")) == set(re.findall(r"^  (--[a-z-]+)", parser.format_help(), re.MULTILINE))
