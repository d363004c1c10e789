"""What the tests of real dumps share: the process that runs the job, in which alone torch is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.torch.scenarios import Scenario

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def run_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Scenario, Path], None]]:
    """Return a function that fills a directory with one scenario's dumps; in CI a missing torch is a failure."""
    if importlib.util.find_spec("torch") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("torch is not installed; CI may not skip what needs it")
        pytest.skip("torch is not installed")
    log = tmp_path_factory.mktemp("torch_job") / "stderr"
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, "-m", "tests.torch.job"],
            cwd=REPOSITORY,
            env={**os.environ, "TORCH_FR_BUFFER_SIZE": "2000"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        # A pipe is what PIPE asks for, but the type of Popen does not know it.
        assert process.stdin is not None
        assert process.stdout is not None
        commands, answers = process.stdin, process.stdout

        def run(scenario: Scenario, directory: Path) -> None:
            print(scenario.name, directory, file=commands, flush=True)
            assert answers.readline() == "done\n", log.read_text()[-4000:]

        yield run
