"""Run a command as a user would, and see how long it takes and how much memory it needs."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a command: its exit code, None where it was stopped, what it printed, and what it cost."""

    returncode: int | None
    output: str
    seconds: float
    peak_bytes: int


def run(command: Sequence[str], timeout_s: float, *, watch_memory: bool = False) -> Run:
    """Run a command and take both its outputs; stop it after `timeout_s` seconds.

    `peak_bytes` is the largest sum over the process and all that it started, 0 unless `watch_memory`: looking slows
    the command down.
    """
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        peak = 0
        try:
            if watch_memory:
                peak = _watch(process, timeout_s)
            process.wait(max(0, start + timeout_s - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        seconds = time.perf_counter() - start
        output.seek(0)
        text = output.read().decode(errors="replace")
    killed = process.returncode < 0
    return Run(None if killed else process.returncode, text, seconds, peak)


def _watch(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    peak = 0
    deadline = time.perf_counter() + timeout_s
    while process.poll() is None and (start := time.perf_counter()) < deadline:
        peak = max(peak, sum(map(_proportional_bytes, _tree(process.pid))))
        # A look at much memory takes long and holds the process up: spend a tenth of the time on it at most.
        time.sleep(max(0.005, 9 * (time.perf_counter() - start)))
    return peak


def _tree(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(member for child in children for member in _tree(int(child)))]


def _proportional_bytes(pid: int) -> int:
    """Return the proportional share of memory: what forked processes share counts once."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
