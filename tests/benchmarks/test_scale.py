"""The scale benchmark measures what it says: sets of the right size, and only tools that find the stalled rank."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fr_exporter.diagnosis import Cause
from tests.verdicts import assert_hang, diagnose

Script = Callable[[str], Any]


@pytest.fixture
def dumps(script: Script, tmp_path: Path) -> Path:
    """Write a set of 16 ranks and 40 calls."""
    written = script("dumps").write_world_set(tmp_path, 16, 40)
    assert written == sum(path.stat().st_size for path in tmp_path.iterdir())
    return tmp_path


def test_the_set_has_one_stalled_rank(script: Script, dumps: Path) -> None:
    """All ranks have 40 calls, the last 20 of them open, but for the one that stopped before those."""
    stalled = script("dumps").STALLED_RANK
    diagnosis = diagnose(dumps)

    assert_hang(diagnosis, Cause.HOST_STALL, [stalled], seq_id=21)
    assert diagnosis.dumped_ranks == tuple(range(16))
    assert {(rank.rank == stalled, *(each.last_enqueued for each in rank.progress)) for rank in diagnosis.ranks} == {
        (False, 40),
        (True, 20),
    }


def test_tools_are_measured_on_their_right_answers(script: Script, dumps: Path) -> None:
    """`analyze` and the bare loop take a finite time on the set; one that says anything else ends the benchmark."""
    scale = script("scale")

    assert all(math.isfinite(tool.measure(dumps)[0]) for tool in (scale.LOOP, scale.ANALYZE))
    with pytest.raises(SystemExit, match=r"^fr-exporter analyze: wrong answer, exit code 1\n"):
        replace(scale.ANALYZE, answer="Rank 6 stopped").measure(dumps)
    with pytest.raises(SystemExit, match=r"^pickle.load loop: wrong answer, exit code 0\n"):
        replace(scale.LOOP, returncode=1).measure(dumps)


def test_a_tool_that_takes_too_long_is_stopped(script: Script) -> None:
    """It has no exit code, and what it printed until then is kept."""
    endless = "import time; print('begun', flush=True); time.sleep(600)"

    stopped = script("processes").run([sys.executable, "-I", "-c", endless], 2.0)

    assert (stopped.returncode, stopped.output) == (None, "begun\n")


def test_table_and_picture(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen times the ranks in 17.6 times the time is 1.1 times linear; who was stopped has no time, but a mark."""
    scale = script("scale")
    sizes = dict.fromkeys(scale.BY_RANKS + scale.BY_CALLS)
    costs = {
        (size, tool): scale.Cost([math.inf if tool is scale.TORCH else 1.1 * size.ranks], 10_000_000)
        for size in sizes
        for tool in scale.TOOLS
    }
    costs[scale.Size(1_024, 20), scale.ANALYZE] = scale.Cost([3_000.0, 1_024.0, 1_000.0], 10_000_000)
    monkeypatch.setattr(scale, "PICTURE", tmp_path / "scale.png")

    scale.print_table(dict.fromkeys(sizes, 5_000_000), costs)
    scale.print_growth(costs)
    scale.draw(costs)

    printed = capsys.readouterr().out
    assert "| 64 | 20 | 5 MB | 70.40 s (70.40 to 70.40), 10 MB | " in printed
    assert "| not finished in 300 s, 10 MB until then |" in printed
    assert "take analyze 17.6 times as long, 1.10 times linear." in printed
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")
