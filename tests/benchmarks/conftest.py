"""What the tests of the benchmarks share: the scripts as modules, where what they import is installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def script() -> Callable[[str], Any]:
    """Return a function that imports a script of the benchmarks; in CI a missing matplotlib is a failure."""
    if importlib.util.find_spec("matplotlib") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("matplotlib is not installed; CI may not skip what needs it")
        pytest.skip("matplotlib is not installed")
    # Scripts import what lies beside them.
    sys.path.append(str(BENCHMARKS))
    return importlib.import_module
