"""What every test may use: the real dump sets, the system tools, and the flag that rewrites golden files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.e2e.s3 import S3Server

settings.register_profile("default", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("default")

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / ".tools"
SHARED_DUMPS = ROOT.parent / "shared" / "dumps"


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
        return _found(name, f"{TOOLS / 'stable/usr/bin'}:{os.environ['PATH']}")

    return require


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3Server]:
    """Return a running S3-compatible server with an empty bucket."""
    server = S3Server(tmp_path / "s3")
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session", params=["stable", "newest"])
def prometheus_tool(request: pytest.FixtureRequest, require_tool: Callable[[str], str]) -> Callable[[str], str]:
    """Return `require_tool` for the Prometheus and Alertmanager of Debian's release, and for the newest."""
    newest = TOOLS / "newest/usr/bin"
    return require_tool if request.param == "stable" else lambda name: _found(name, str(newest))


@pytest.fixture(scope="session")
def promtool(prometheus_tool: Callable[[str], str]) -> str:
    """Return the path of promtool, of Prometheus 2 and 3."""
    return prometheus_tool("promtool")


def _found(name: str, path: str) -> str:
    found = shutil.which(name, path=path)
    if found is None and os.environ.get("CI") == "true":
        pytest.fail(f"{name} is not in {path}; CI may not skip what needs it")
    if found is None:
        pytest.skip(f"{name} is not in {path}: tools/install-system-tools.sh gets it on Debian")
    return found
