"""What every end-to-end test may use."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    """Return an empty directory of dumps."""
    directory = tmp_path / "dumps"
    directory.mkdir()
    return directory
