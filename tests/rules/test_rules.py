"""The rule files, checked and tried by Prometheus' own tool, of Prometheus 2.42 and of the newest."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.source.__main__ import main

HERE = Path(__file__).parent
DASHBOARDS = HERE.parents[1] / "dashboards"
RULE_FILES = sorted((DASHBOARDS / "rules").glob("*.yaml"))
TEST_FILES = sorted(HERE.glob("*.yaml"))

ALERTS = sorted(
    {
        rule["alert"]
        for file in RULE_FILES
        for group in yaml.safe_load(file.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
)


def run(*command: str | Path) -> tuple[int, str]:
    """Return the exit code of a command and all that it printed."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout


def cases() -> Iterator[dict[str, Any]]:
    """Yield every test of promtool's files."""
    for file in TEST_FILES:
        yield from yaml.safe_load(file.read_text())["tests"]


def expectations(alert: str) -> Iterator[bool]:
    """Yield for each expectation about an alert in promtool's files whether it is to be there."""
    for case in cases():
        for test in case.get("alert_rule_test", []):
            if test["alertname"] == alert:
                yield bool(test["exp_alerts"])
        for test in case.get("promql_expr_test", []):
            if f'ALERTS{{alertname="{alert}"' in test["expr"]:
                yield bool(test["exp_samples"])


def test_the_rules_are_clean(promtool: str) -> None:
    """Prometheus' linter has nothing to say about any rule."""
    code, output = run(promtool, "check", "rules", "--lint=all", "--lint-fatal", *RULE_FILES)
    assert code == 0, output


@pytest.mark.parametrize("file", TEST_FILES, ids=lambda file: file.stem)
def test_the_rules_do_what_the_tests_say(file: Path, promtool: str) -> None:
    """Every alert fires, with its labels and annotations, and stays silent, as promtool's tests say."""
    code, output = run(promtool, "test", "rules", file)
    assert code == 0, output


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_is_seen_to_fire_and_to_be_silent(alert: str) -> None:
    """There is a test in which each alert fires, and one in which it does not, and both say so in their name."""
    assert set(expectations(alert)) == {True, False}
    named = [case["name"] for case in cases() if re.match(rf"{alert}\b", case["name"])]
    assert any(" does not " in name for name in named)
    assert any(" does not " not in name for name in named)


def test_generated_files_that_differ_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is committed is what the sources give; a file that was edited by hand fails the check, in one line."""
    assert main(["--check"]) == 0
    (tmp_path / "rules").mkdir()
    assert main([], folder=tmp_path) == 0
    assert main(["--check"], folder=tmp_path) == 0
    edited = tmp_path / "rules" / "alerts.yaml"
    edited.write_text(edited.read_text().replace("10m", "5m"))
    assert main(["--check"], folder=tmp_path) == 1
    assert capsys.readouterr().err == f"{edited} is out of date: run python -m dashboards.source\n"
