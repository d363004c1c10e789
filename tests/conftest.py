"""What every test may use: the real dump sets, the system tools, and the flag that rewrites golden files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("default", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("default")

SHARED_DUMPS = Path(__file__).resolve().parents[2] / "shared" / "dumps"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--update-golden`."""
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files from the present output")


@pytest.fixture(scope="session")
def shared_dumps() -> Path:
    """Return the folder of real dump sets, or skip: a clone of the repository comes without it."""
    if not SHARED_DUMPS.is_dir():
        pytest.skip(f"the real dump sets are not beside the repository ({SHARED_DUMPS})")
    return SHARED_DUMPS


@pytest.fixture(scope="session")
def require_tool() -> Callable[[str], str]:
    """Return a function that gives a system tool's path, or skips the test; in CI a missing tool is a failure."""

    def require(name: str) -> str:
        path = shutil.which(name)
        if path is None and os.environ.get("CI") == "true":
            pytest.fail(f"{name} is not installed; CI may not skip what needs it")
        if path is None:
            pytest.skip(f"{name} is not installed")
        return path

    return require
