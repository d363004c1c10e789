"""The accuracy benchmark scores as it says, and runs where no other tool is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fr_exporter.simulate import Truth
from fr_exporter.simulate.aftermath import StuckIn
from tests.benchmarks.conftest import BENCHMARKS

Script = Callable[[str], Any]

STUCK = StuckIn("7", "tp", (2, 3), "all_reduce", "collective", 5)


def truth(required: Sequence[int], allowed: Sequence[int]) -> Truth:
    """Return the truth of a stalled host that holds up group 7, or of a job in which nothing hangs."""
    hangs = bool(allowed)
    return Truth(
        seed=0,
        world_size=8,
        faults=(),
        verdict="hang" if hangs else "healthy",
        required=tuple(required),
        allowed=tuple(allowed),
        causes=("host_stall",) if hangs else (),
        hung=(STUCK,) if hangs else (),
        decidable=required == allowed,
        note="",
    )


@pytest.mark.parametrize(
    ("required", "allowed", "named", "contained", "exact"),
    [
        pytest.param([3], [3], {3}, True, True, id="exact"),
        pytest.param([3], [3], {3, 4}, True, False, id="an innocent beside it"),
        pytest.param([3], [3], {4}, False, False, id="an innocent instead"),
        pytest.param([3], [3], set(), False, False, id="nobody"),
        pytest.param([1, 3], [1, 3], {3}, False, False, id="one of two"),
        pytest.param([3], [2, 3], {2, 3}, True, True, id="all that are allowed"),
        pytest.param([], [2, 3], {2}, True, True, id="not decidable, one of the two"),
        pytest.param([], [2, 3], {2, 3}, True, True, id="not decidable, both"),
        pytest.param([], [2, 3], {2, 4}, True, False, id="not decidable, an innocent beside it"),
        pytest.param([], [2, 3], {4}, False, False, id="not decidable, an innocent instead"),
        pytest.param([], [2, 3], set(), False, False, id="not decidable, nobody"),
    ],
)
def test_suspects_are_scored(
    script: Script, required: list[int], allowed: list[int], named: set[int], contained: bool, exact: bool
) -> None:
    """Contained: whom a right answer must name is there. Exact: and nobody whom it may not name."""
    answer = script("peers").Answer(suspects=frozenset(named), verdict="hang")

    score = script("accuracy").score(truth(required, allowed), answer)

    assert (score.contained, score.exact) == (contained, exact)
    assert not score.false_alarm


@pytest.mark.parametrize(
    ("causes", "groups", "cause", "group"),
    [
        ({"host_stall"}, {"7"}, True, True),
        ({"host_stall", "desync"}, {"7", "8"}, True, True),
        ({"desync"}, {"8"}, False, False),
        (set(), set(), False, False),
    ],
)
def test_cause_and_group_are_scored(
    script: Script, causes: set[str], groups: set[str], cause: bool, group: bool
) -> None:
    """One that is right is enough: other tools leave several open."""
    answer = script("peers").Answer(causes=frozenset(causes), hung_groups=frozenset(groups), verdict="hang")

    score = script("accuracy").score(truth([3], [3]), answer)

    assert (score.cause, score.group) == (cause, group)


@pytest.mark.parametrize(
    ("verdict", "named", "is_right", "false_alarm"),
    [("healthy", set(), True, False), ("hang", {3}, False, True), ("inconclusive", set(), False, False)],
)
def test_healthy_sets_are_scored(
    script: Script, verdict: str, named: set[int], is_right: bool, false_alarm: bool
) -> None:
    """Where nothing hangs only `healthy` is right, and only `hang` wakes somebody for nothing."""
    answer = script("peers").Answer(suspects=frozenset(named), verdict=verdict)

    score = script("accuracy").score(truth([], []), answer)

    assert {score.exact, score.contained, score.cause, score.group} == {is_right}
    assert score.false_alarm == false_alarm


@pytest.mark.parametrize("of", [truth([3], [3]), truth([], [])])
def test_a_crash_is_never_right(script: Script, of: Truth) -> None:
    """A tool that crashed has answered nothing, on a healthy set too."""
    score = script("accuracy").score(of, script("peers").Answer(crashed="KeyError: 7"))

    assert score.crashed
    assert {score.exact, score.contained, score.cause, score.group, score.false_alarm} == {False}


def test_a_set_is_found_by_its_name(script: Script) -> None:
    """`--show` takes the name that stands in the list of misses."""
    accuracy = script("accuracy")
    cases = list(accuracy.cases(["host_stall", "healthy"]))

    assert [accuracy.Case.named(case.name) for case in cases] == cases


def without_peers(tmp_path: Path, *arguments: str) -> str:
    """Run the benchmark where torch cannot be imported, as in an installation without it; return what it prints."""
    (tmp_path / "torch.py").write_text("raise ImportError\n")
    command = [sys.executable, str(BENCHMARKS / "accuracy.py"), *arguments]
    return subprocess.check_output(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, text=True)


@pytest.mark.usefixtures("script")
def test_benchmark_runs_without_peers(tmp_path: Path) -> None:
    """Four sets of stalled hosts are counted, and fr_exporter alone is scored: all right."""
    report = without_peers(tmp_path, "--faults", "host_stall", "healthy", "--limit", "4", "--jobs", "1")

    assert report.startswith("fr_exporter ")
    assert "4 sets: 0 without a hang, 4 that hang in a way that dumps decide, 0 in a way that they do not." in report
    assert report.count("| host_stall | 4 | 100.0 % |") == 4
    assert report.endswith("### Every miss of fr_exporter\n\nNone.\n\n")


@pytest.mark.usefixtures("script")
def test_benchmark_shows_a_set(tmp_path: Path) -> None:
    """The truth stands beside what fr_exporter says; the rank that stalled is the one it names."""
    shown = without_peers(tmp_path, "--show", "host_stall/t1-p1-d8-e1-c1/0")

    told, _, said = shown.partition("\n}\n")
    (fault,) = json.loads(told + "}")["faults"]
    assert said.startswith(f"fr_exporter: hang, ranks {fault['ranks']}, ")


def test_misses_and_picture(script: Script, tmp_path: Path) -> None:
    """A wrong answer is listed with what was right and what was said, and the picture has a bar for the fault."""
    accuracy, report = script("accuracy"), script("accuracy_report")
    wrong = accuracy.score(truth([3], [3]), script("peers").Answer(suspects=frozenset({4}), verdict="hang"))
    scored = report.Scored(
        "host_stall/t2/0", "host_stall", truth([3], [3]), {"fr_exporter": wrong}, {"fr_exporter": "4"}
    )

    assert "- `host_stall/t2/0`: " in report.render([scored], ["fr_exporter 1"])
    report.draw([scored], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_report_goes_between_its_marks(script: Script, tmp_path: Path) -> None:
    """What stands before and after the measured part of the page stays."""
    report, page = script("accuracy_report"), tmp_path / "accuracy.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")

    report.publish("new\n", page)

    assert page.read_text() == f"before\n{report.BEGIN}\n\nnew\n\n{report.END}\nafter\n"
