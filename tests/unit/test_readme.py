"""What the README tells readers to type."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.mark.e2e
def test_the_drill_of_the_readme_names_the_rank_at_fault(tmp_path: Path) -> None:
    """The line, run as it stands there, ends in the exit code of a hang and a report that names the stalled rank."""
    [line] = re.findall(r"^fr-exporter simulate .*$", README.read_text(encoding="utf-8"), re.MULTILINE)
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["/bin/sh", "-c", line],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (1, "")
    [truth] = [json.loads(file.read_text()) for file in tmp_path.glob("*/truth.json")]
    [rank] = truth["required"]
    assert truth["faults"] == [{"name": "host_stall", "ranks": [rank]}]
    assert f"\n  rank {rank}: host_stall, high confidence\n" in ended.stdout
