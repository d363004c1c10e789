"""Measure what docs/performance.md states. Builds its own sets; compares with a bare `pickle.load` loop.

    python benchmarks/performance.py [--rounds N] [--keep DIR]

Runs alternate between the two sides, since a shared machine is never equally fast for long; medians are printed.
"""

from __future__ import annotations

import argparse
import pickle
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dumps import write_set
from processes import run

CALLS = 200
BARE_LOOP = """
import os, pickle, sys, time
start = time.perf_counter()
for entry in os.scandir(sys.argv[1]):
    with open(entry.path, "rb") as file:
        pickle.load(file)
print(time.perf_counter() - start)
"""
PORT = 19_999
PAGE_BYTES = resource.getpagesize()


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--keep", type=Path, help="build the sets here and keep them")
    arguments = parser.parse_args()
    with _directory(arguments.keep) as directory:
        small, large = _set(directory, 1_024), _set(directory, 4_096)
        compare(small, large, arguments.rounds)
        memory(small)
        serve_idle()
        scrape(directory)


@contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _set(directory: Path, ranks: int) -> Path:
    path = directory / f"{ranks}x{CALLS}"
    if not path.exists():
        size = write_set(path, ranks, CALLS)
        print(f"built {ranks} ranks x {CALLS} calls: {size / 1e6:.0f} MB")
    return path


def compare(small: Path, large: Path, rounds: int) -> None:
    """Time the whole `analyze` process against the loop, and four times the ranks against them."""
    times: dict[str, list[float]] = {"loop": [], "analyze": [], "analyze --jobs 1": [], "analyze 4096": []}
    for _ in range(rounds):
        times["loop"].append(_loop(small))
        times["analyze"].append(_analyze(small))
        times["analyze --jobs 1"].append(_analyze(small, "--jobs", "1"))
        times["analyze 4096"].append(_analyze(large))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, values in times.items():
        print(f"{name}: median {medians[name]:.2f} s, {min(values):.2f} to {max(values):.2f}")
    print(f"analyze / loop: {medians['analyze'] / medians['loop']:.2f}")
    print(f"analyze --jobs 1 / loop: {medians['analyze --jobs 1'] / medians['loop']:.2f}")
    print(f"4096 / 1024 ranks: {medians['analyze 4096'] / medians['analyze']:.2f}")


def _loop(path: Path) -> float:
    return float(subprocess.check_output([sys.executable, "-c", BARE_LOOP, str(path)]))


def _analyze(path: Path, *options: str) -> float:
    start = time.perf_counter()
    command = [sys.executable, "-m", "fr_exporter", "analyze", str(path), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode != 1 or "Rank 5 stopped issuing calls" not in done.stdout:
        sys.exit(f"wrong verdict: exit code {done.returncode}\n{done.stdout}")
    return seconds


def memory(path: Path) -> None:
    """Report the peak memory of `analyze` and all its processes."""
    for options in ([], ["--jobs", "1"]):
        done = run([sys.executable, "-m", "fr_exporter", "analyze", str(path), *options], 60, watch_memory=True)
        print(f"peak memory of analyze {' '.join(options)}: {done.peak_bytes / 1e6:.0f} MB")


@contextmanager
def _serve(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    config = directory.parent / "serve.yaml"
    config.write_text(
        f"targets: [{{training_job: bench, path: {directory}}}]\nweb: {{listen: '127.0.0.1:{PORT}'}}\n"
        "dump_set: {grace: 1s}\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "fr_exporter", "serve", "--config", str(config)], stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def serve_idle(seconds: float = 30) -> None:
    """Measure resident memory and CPU of `serve` on an empty directory."""
    with tempfile.TemporaryDirectory() as name:
        empty = Path(name) / "dumps"
        empty.mkdir()
        with _serve(empty) as process:
            time.sleep(3)
            before = _cpu_seconds(process.pid)
            time.sleep(seconds)
            used = _cpu_seconds(process.pid) - before
            resident = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * PAGE_BYTES
    print(f"serve, idle: {resident / 1e6:.0f} MB resident, {100 * used / seconds:.3f} % of a core over {seconds:.0f} s")


def _cpu_seconds(pid: int) -> float:
    """Return user and system time, from the scheduler: /proc/PID/stat counts ticks of 10 ms."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def scrape(directory: Path, ranks: int = 16, groups: int = 13, rounds: int = 50) -> None:
    """Time GET /metrics over HTTP with the dumps of a small job loaded."""
    path = directory / "scrape"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for rank in range(ranks):
        (path / f"_dump_{rank}").write_bytes(pickle.dumps(_small_dump(ranks, groups), protocol=2))
    with _serve(path):
        body = b""
        deadline = time.monotonic() + 20
        while b"fr_rank_last_completed_seq_id{" not in body and time.monotonic() < deadline:
            time.sleep(0.2)
            body = _get()
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            body = _get()
            times.append(time.perf_counter() - start)
    series = sum(not line.startswith(b"#") for line in body.splitlines())
    print(
        f"/metrics, {ranks} ranks x {groups} groups, {series} series: "
        f"median {1000 * statistics.median(times):.1f} ms, largest {1000 * max(times):.1f} ms"
    )


def _get() -> bytes:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics") as response:
            return bytes(response.read())
    except OSError:
        return b""


def _small_dump(ranks: int, groups: int) -> dict[str, object]:
    members = str(list(range(ranks)))
    status = {"last_enqueued_collective": 9, "last_started_collective": 9, "last_completed_collective": 8}
    return {
        "version": "2.10",
        "pg_config": {
            str(name): {"name": str(name), "desc": f"group {name}", "ranks": members} for name in range(groups)
        },
        "pg_status": {str(local): status for local in range(groups)},
        "entries": [],
    }


if __name__ == "__main__":
    main()
