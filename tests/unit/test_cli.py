"""The command line: what it prints, where, and its exit codes."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from fr_exporter import __version__, analyze_dumps, cli
from fr_exporter.cli import attribution_main, main
from tests.builders import Job, write

ROOT = Path(__file__).resolve().parents[2]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def hang(tmp_path: Path) -> Path:
    """Write the dumps of four ranks of which rank 2 never issues the second all_reduce."""
    job = Job(world_size=4)
    job.collective(job.world)
    job.collective(job.world, by=job.world.without(2))
    return job.write(_directory(tmp_path, "hang"))


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    """Write the dumps of four ranks that finished all they issued."""
    job = Job(world_size=4)
    job.collective(job.world, times=3)
    return job.write(_directory(tmp_path, "healthy"))


@pytest.fixture
def inconclusive(tmp_path: Path) -> Path:
    """Write dumps without entries, in whose counters rank 2 is one collective behind."""
    job = Job(world_size=4)
    job.collective(job.world, times=9)
    job.collective(job.world, by=job.world.without(2), done=True)
    dumps = {rank: {**dump, "entries": []} for rank, dump in job.dumps().items()}
    return write(_directory(tmp_path, "inconclusive"), dumps, mtime_ns=job.now_ns)


def _directory(parent: Path, name: str) -> Path:
    directory = parent / name
    directory.mkdir()
    return directory


def _run(
    *arguments: str, stdout: int | IO[bytes] = subprocess.PIPE, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fr_exporter", *arguments],
        cwd=ROOT,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
        # Buffered, as users have it: what is left in a buffer fails once more at exit.
        env={**os.environ, "PYTHONUNBUFFERED": "", **(env or {})},
    )


def test_the_exit_code_is_the_verdict(hang: Path, healthy: Path, inconclusive: Path, capsys: Capture) -> None:
    """A script can tell a hang (1), no hang (0) and too little evidence (3) apart; the report says the same."""
    for directory, code, word in ((hang, 1, "HANG"), (healthy, 0, "HEALTHY"), (inconclusive, 3, "INCONCLUSIVE")):
        assert main(["analyze", str(directory)]) == code
        out, err = capsys.readouterr()
        assert out.startswith(f"{word}: ")
        assert err == ""


def test_the_report_of_the_example_incident(tmp_path: Path, capsys: Capture) -> None:
    """Ranks 12 and 14 stopped before an all_to_all of group 34, in which 13 and 15 wait: so it was built."""
    incident = runpy.run_path(str(ROOT / "examples" / "incident.py"))
    incident["write"](tmp_path, time.time_ns())
    assert main(["analyze", "--fr-path", str(tmp_path), "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["suspect_ranks"] == list(incident["STALLED_RANKS"]) == [12, 14]
    assert {suspect["cause"] for suspect in found["suspects"]} == {found["cause"]} == {"host_stall"}
    headline = found["hung_process_groups"][0]
    assert (headline["process_group"], headline["operation"]) == ("34", "nccl:all_to_all")
    assert (headline["waiting_ranks"], headline["waiting_on"]) == ([13, 15], [12, 14])
    assert found["warnings"] == []

    assert main(["analyze", str(tmp_path)]) == 1
    report = capsys.readouterr().out
    assert report.index("rank 12: host_stall") < report.index("Hung process groups") < report.index("for ranks 12, 14")
    # Where the host of a stalled rank was last seen.
    assert "at attention (/opt/train/layers/attention.py:128)" in report


def test_both_commands_and_both_ways_to_name_the_dumps_agree(hang: Path, capsys: Capture) -> None:
    """`fr-attribution --fr-path DIR` and `fr-exporter analyze DIR` print the same report."""
    assert attribution_main(["--fr-path", str(hang)]) == 1
    expected = capsys.readouterr().out
    assert main(["analyze", str(hang)]) == 1
    assert capsys.readouterr().out == expected
    assert main(["analyze", f"--fr-path={hang}/_dump_"]) == 1
    assert capsys.readouterr().out == expected.replace(str(hang), f"{hang}/_dump_")


def test_flags_reach_the_analysis(hang: Path, capsys: Capture) -> None:
    """Scope, world size and pattern decide what is expected and read; verbose and health check what is printed."""
    main(["analyze", str(hang), "--format", "json", "--scope", "node", "--world-size", "8", "-p", "_dump_[01]"])
    found = json.loads(capsys.readouterr().out)
    assert (found["scope"], found["world_size"], found["dumped_ranks"]) == ("node", 8, [0, 1])
    main(["analyze", str(hang), "-v", "-c"])
    report = capsys.readouterr().out
    assert "\nHealth checks\n" in report
    assert "\nRanks\n" in report


def test_a_known_name_stands_in_for_the_default_pattern(hang: Path, capsys: Capture) -> None:
    """Where no file matches the pattern, PyTorch's own names are tried, and the report says so."""
    for path in hang.iterdir():
        path.rename(path.with_name(path.name.replace("_dump_", "nccl_trace_rank_")))
    assert main(["analyze", str(hang)]) == 1
    assert "No file matches _dump_*: read the files named nccl_trace_rank_<rank>" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["analyze"], "one of the arguments --fr-path PATH is required (see fr-exporter analyze --help)"),
        (["analyze", "a", "--fr-path", "b"], "argument --fr-path: not allowed with argument PATH"),
        (["analyze", "/nowhere/at/all"], "/nowhere/at/all: No such file or directory"),
        (["analyze", ""], "the path of the dumps is empty"),
        (["analyze", ".", "--scope", "nodes"], "argument --scope: invalid choice: 'nodes'"),
        (["analyze", ".", "--world-size", "0"], "world size must be at least 1, not 0"),
        (["analyze", ".", "--world-size", "many"], "argument --world-size: invalid int value: 'many'"),
        (["analyze", ".", "--verb"], "unrecognized arguments: --verb"),
        (["analyse", "."], "invalid choice: 'analyse'"),
        (["analyze", "no\nsuch\x1bthing"], "no\\nsuch\\x1bthing"),
        (["serve", "--config", "/nowhere.yaml"], "/nowhere.yaml: No such file or directory"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], line: str, capsys: Capture) -> None:
    """A mistake ends in exit code 2, one line on standard error that names it, and nothing on standard output."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fr-exporter: error: ")
    assert line in err
    assert err.count("\n") == 1


def test_nothing_readable_is_not_a_verdict(tmp_path: Path, capsys: Capture) -> None:
    """An empty directory, and one in which no file can be read, are exit code 2 with the reason in one line."""
    assert main(["analyze", str(tmp_path)]) == 2
    assert "no file matches _dump_*" in capsys.readouterr().err
    (tmp_path / "_dump_0").write_bytes(b"")
    assert main(["analyze", str(tmp_path)]) == 2
    assert "_dump_0: empty" in capsys.readouterr().err


@pytest.mark.parametrize(("debug", "lines"), [("0", 1), ("1", None)])
def test_an_internal_error_is_not_a_hang(
    debug: str, lines: int | None, hang: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A bug ends in exit code 4 and one line; FR_DEBUG=1 shows the traceback as well."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "analyze_dumps", broken)
    monkeypatch.setenv("FR_DEBUG", debug)
    assert main(["analyze", str(hang)]) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("fr-exporter: error: internal error, please report it: RuntimeError: a bug")
    assert ("Traceback" in err) == (lines is None)
    assert lines is None or err.count("\n") == lines


def test_a_fault_of_the_parser_is_one_line_as_well(hang: Path) -> None:
    """What a bug makes of a file is said once, with the file's name, and FR_DEBUG=1 shows where the bug is."""
    code = (
        "import sys; from fr_exporter import cli, parsing; parsing.DumpReader.read = lambda *_, **__: 1 / 0; "
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    for debug, has_traceback in (("0", False), ("1", True)):
        done = subprocess.run(
            [sys.executable, "-c", code, "analyze", str(hang)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env={**os.environ, "FR_DEBUG": debug},
        )
        assert done.returncode == 2
        assert "the parser failed on it (ZeroDivisionError: division by zero)" in done.stderr.splitlines()[-1]
        assert ("Traceback" in done.stderr) == has_traceback
        assert has_traceback or done.stderr.count("\n") == 1


def test_debug_writes_each_dump_as_json_elsewhere(hang: Path, tmp_path: Path, capsys: Capture) -> None:
    """The JSON of the dumps goes into the directory that was named, the dumps stay alone, the report stays clean."""
    before = sorted(path.name for path in hang.iterdir())
    (hang / "_dump_3").write_bytes(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R.")
    target = tmp_path / "as" / "json"
    assert main(["analyze", str(hang), "--format", "json", "--debug", "--debug-dir", str(target)]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["verdict"] == "hang"
    assert f"wrote 3 dumps as JSON to {target}\n" in err
    assert "_dump_3: not written as JSON: " in err
    assert sorted(path.name for path in hang.iterdir()) == before
    assert sorted(path.name for path in target.iterdir()) == ["_dump_0.json", "_dump_1.json", "_dump_2.json"]
    written = json.loads((target / "_dump_0.json").read_text())
    assert [entry["profiling_name"] for entry in written["entries"]] == ["nccl:all_reduce"] * 2


def test_debug_without_a_directory_takes_a_fresh_one(hang: Path, tmp_path: Path) -> None:
    """Without --debug-dir a new directory under the system's temporary one is made, and said."""
    scratch = _directory(tmp_path, "scratch")
    done = _run("analyze", str(hang), "--debug", env={"TMPDIR": str(scratch)})
    (made,) = scratch.iterdir()
    assert done.stderr == f"wrote 4 dumps as JSON to {made}\n"
    assert len(list(made.iterdir())) == 4


def test_debug_never_writes_beside_the_dumps(hang: Path, capsys: Capture) -> None:
    """The dumps' own directory is refused, under whatever name, and nothing is written into it."""
    before = sorted(hang.iterdir())
    assert main(["analyze", str(hang), "--debug-dir", f"{hang}/../hang/"]) == 2
    assert "is where the dumps are; choose another directory" in capsys.readouterr().err
    assert sorted(hang.iterdir()) == before


def test_debug_output_that_cannot_be_written_is_one_line(hang: Path, tmp_path: Path, capsys: Capture) -> None:
    """A file in the place of the directory, or of the output a directory, is a mistake of the caller: exit code 2."""
    file = tmp_path / "file"
    file.touch()
    taken = _directory(tmp_path, "taken")
    _directory(taken, "_dump_0.json")
    for directory, line in (
        (file, f"--debug-dir {file}: is not a directory"),
        (file / "below", f"--debug-dir {file}/below: Not a directory"),
        (taken, f"--debug-dir: cannot write {taken}/_dump_0.json: Is a directory"),
    ):
        assert main(["analyze", str(hang), "--debug-dir", str(directory)]) == 2
        out, err = capsys.readouterr()
        assert (out, err) == ("", f"fr-exporter: error: {line}\n")


def test_a_reader_that_leaves_is_no_error(hang: Path) -> None:
    """`fr-exporter analyze … | head -0` prints no complaint and keeps its exit code."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as stdout:
        for arguments, code in ((["analyze", str(hang)], 1), (["--help"], 0), (["--version"], 0)):
            # Unbuffered, the write itself fails and not the flush.
            for unbuffered in ("", "1"):
                done = _run(*arguments, stdout=stdout, env={"PYTHONUNBUFFERED": unbuffered})
                assert (done.returncode, done.stderr) == (code, "")


def test_a_full_disk_is_not_a_verdict(hang: Path) -> None:
    """A report that could not be written is exit code 4 and one line, never the code of a hang."""
    with open("/dev/full", "wb") as stdout:
        done = _run("analyze", str(hang), stdout=stdout)
    assert done.returncode == 4
    assert done.stderr == "fr-exporter: error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    ("redirection", "path", "code"),
    [(">&-", "hang", 1), (">&-", "healthy", 0), ("2>/dev/full", "nothing", 2), ("2>&-", "nothing", 2)],
)
def test_the_exit_code_survives_closed_and_full_streams(
    redirection: str, path: str, code: int, hang: Path, healthy: Path, tmp_path: Path
) -> None:
    """Who asks for the exit code alone gets it, and an error that cannot be written never ends in that of a hang."""
    assert {hang.name, healthy.name} == {path.name for path in tmp_path.iterdir()}
    command = f'"$0" -m fr_exporter analyze "$1" {redirection}'
    shell = ["sh", "-c", command, sys.executable, str(tmp_path / path)]
    assert subprocess.run(shell, cwd=ROOT, check=False, timeout=60).returncode == code


def test_any_encoding_of_the_terminal_will_do(tmp_path: Path) -> None:
    """A name outside the terminal's encoding is printed as its escape."""
    job = Job(world_size=2)
    group = job.group("5", "データ", [0, 1])
    job.collective(group)
    job.collective(group, by=[0])
    job.write(tmp_path)
    done = _run("analyze", str(tmp_path), env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 1
    assert "\\u30c7\\u30fc\\u30bf" in done.stdout


def test_analyze_starts_without_the_daemons_libraries(hang: Path) -> None:
    """The command line loads nothing that only `serve` needs."""
    code = (
        "import sys; from fr_exporter.cli import main; code = main(sys.argv[1:]); "
        "unwanted = {'prometheus_client', 'watchdog', 'waitress', 'asyncio', 'http', 'yaml'}; "
        "print(*unwanted & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "analyze", str(hang)], cwd=ROOT, capture_output=True, check=True, timeout=60
    )
    assert done.stderr == b"\n"


def test_check_config_says_what_would_be_watched(tmp_path: Path, capsys: Capture) -> None:
    """A good configuration prints its targets; one that expands variables shows what they became."""
    file = tmp_path / "config.yaml"
    file.write_text(
        "targets: [{training_job: llm, path: /dumps, scope: node}, {path: /jobs, discover: true}, "
        "{training_job: llama 7, url: s3://bucket/fr/}, {url: 's3://me:secret@bucket/fr', discover: true}]"
    )
    assert main(["check-config", str(file)]) == 0
    assert capsys.readouterr().out == (
        f"{file}: ok\n"
        "  llm (scope node): /dumps/_dump_*\n"
        "  each sub-directory (scope job): /jobs/<training job>/_dump_*\n"
        "  llama 7 (scope job): s3://bucket/fr/llama%207/<attempt>/<node>\n"
        "  each sub-directory (scope job): s3://***@bucket/fr/<training job>/<attempt>/<node>\n"
    )


def test_check_config_without_a_file_shows_the_defaults(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """The built-in configuration watches the prefix that PyTorch was given."""
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "/scratch/trace_")
    assert main(["check-config"]) == 0
    assert capsys.readouterr().out == "built-in configuration: ok\n  default (scope job): /scratch/trace_<rank>\n"


@pytest.mark.parametrize(
    ("content", "message"), [(b"tragets: []", "tragets"), (b"\xff\xfe", "is not UTF-8 text"), (b"a: [", "line 1")]
)
def test_a_bad_configuration_is_one_line(content: bytes, message: str, tmp_path: Path, capsys: Capture) -> None:
    """`check-config` and `serve` name the file and the mistake, and end in exit code 2."""
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    for arguments in (["check-config", str(file)], ["serve", "--config", str(file)]):
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"fr-exporter: error: {file}: ")
        assert message in err
        assert err.count("\n") == 1


def test_check_config_says_where_a_node_publishes(tmp_path: Path, capsys: Capture) -> None:
    """What each job's object will be called, so that the fleet exporter's URL can be compared."""
    file = tmp_path / "config.yaml"
    file.write_text("publish: {url: 's3://bucket/fr', training_job: llm, attempt: 3}\ntopology: {node: gpu-7}\n")
    assert main(["check-config", str(file)]) == 0
    assert capsys.readouterr().out.endswith("  published to s3://bucket/fr/llm/3/gpu-7\n")


@pytest.mark.parametrize(
    "section", ["targets: [{{url: '{url}'}}]", "publish: {{url: '{url}', training_job: llm}}\ntopology: {{node: n}}"]
)
@pytest.mark.parametrize(
    ("url", "message"), [("s4://bucket", "'s4' is no protocol of fsspec"), ("file://fr", "names no store")]
)
def test_a_url_of_no_store_is_found_before_it_is_needed(
    section: str, url: str, message: str, tmp_path: Path, capsys: Capture
) -> None:
    """`check-config` refuses what no driver serves, on the reading and on the publishing side."""
    file = tmp_path / "config.yaml"
    file.write_text(section.format(url=url))
    assert main(["check-config", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_a_node_whose_objects_no_file_system_could_name_is_refused(tmp_path: Path, capsys: Capture) -> None:
    """Said before the start in one line, since the first hang would be too late."""
    file = tmp_path / "config.yaml"
    file.write_text(f"publish: {{url: 'file://{tmp_path}', training_job: llm}}\ntopology: {{node: {'n' * 256}}}\n")
    assert main(["check-config", str(file)]) == 2
    assert capsys.readouterr().err.endswith("256 bytes when quoted, and a file name has 255 at most; shorten it\n")


@pytest.mark.parametrize("entry", [main, attribution_main])
def test_version_and_help(entry: Callable[[list[str]], int], capsys: Capture) -> None:
    """Both commands say what they are, with exit code 0."""
    assert entry(["--version"]) == 0
    assert capsys.readouterr().out == f"fr-exporter {__version__}\n"
    assert entry(["--help"]) == 0
    assert "usage: fr-" in capsys.readouterr().out


def test_the_command_line_and_the_library_agree(hang: Path, capsys: Capture) -> None:
    """`--format json` is `Diagnosis.to_dict` of the same files, apart from the time at which it was asked."""
    main(["analyze", str(hang), "--format", "json"])
    printed = json.loads(capsys.readouterr().out)
    expected = analyze_dumps(hang).to_dict()
    volatile = {"generated_at": None, "generated_at_ns": None}
    assert {**printed, **volatile} == {**expected, **volatile}
