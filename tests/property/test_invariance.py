"""The verdict depends on what is in the dumps, and on nothing of how they are found, named, ordered and read."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fr_exporter.config import DEFAULT_PATTERN, load
from fr_exporter.diagnosis import Cause
from fr_exporter.dumpset import DumpSetSettings, final_set
from fr_exporter.offline import analyze_path
from fr_exporter.pipeline import Pipeline, find_dumps
from fr_exporter.simulate import Injection, Plan, Recorder, Schedule, Sizes, simulate
from tests.builders import SECOND, write

EPOCH_NS = 1_790_000_000_000_000_000
plan = partial(Plan, schedule=Schedule(steps=3, layers=1), ranks_per_node=4)

# One set for each way in which several ranks or several calls stand side by side, and its cause.
SETS: Mapping[str, tuple[Plan, Cause]] = {
    "cycle": (plan(Sizes(tensor=2, data=4), (Injection("skipped_call"),)), Cause.ORDER_DEADLOCK),
    "cycle without history": (
        plan(Sizes(pipeline=4, data=3), (Injection("skipped_call"),), recorder=Recorder(only_active=True), seed=1),
        Cause.ORDER_DEADLOCK,
    ),
    "mismatch at a tie": (plan(Sizes(tensor=2, pipeline=2), (Injection("mismatch_size"),)), Cause.COLLECTIVE_MISMATCH),
    "three stalled hosts": (plan(Sizes(pipeline=4, data=3), (Injection("host_stall", (1, 4, 6)),)), Cause.HOST_STALL),
    "node lost": (plan(Sizes(tensor=2, pipeline=2, data=3), (Injection("node_lost"),)), Cause.MISSING_DUMP),
    "link fault": (plan(Sizes(tensor=4, data=3), (Injection("link_fault"),), seed=2), Cause.COMMUNICATION_FAULT),
}
ANALYSE_EACH = """
import json, sys
from fr_exporter.offline import analyze_path
print(json.dumps([analyze_path(path, generated_at_ns=0).to_dict() for path in sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Write each set into a directory of its own."""
    found: dict[str, Path] = {}
    for name, (of_set, _) in SETS.items():
        job = simulate(of_set)
        found[name] = write(
            tmp_path_factory.mktemp("dumps"),
            {rank: job.dump(rank, EPOCH_NS) for rank in job.moments},
            mtime_ns={rank: EPOCH_NS + moment for rank, moment in job.moments.items()},
        )
    return found


def analyse(directory: Path, *, jobs: int = 1) -> dict[str, Any]:
    """Return the diagnosis as plain data, as at one moment."""
    return analyze_path(str(directory), generated_at_ns=0, jobs=jobs).to_dict()


@pytest.mark.parametrize("name", SETS)
def test_order_in_which_files_are_read(directories: Mapping[str, Path], name: str) -> None:
    """Files listed and read in any order give one diagnosis."""
    source = str(directories[name])
    expected = analyse(directories[name])
    assert expected["cause"] == SETS[name][1]
    config = load("", env={}, home="")
    settings = DumpSetSettings("default", source, "job", None, config.dump_set.window_s, config.dump_set.grace_s)
    files, _ = find_dumps(source, DEFAULT_PATTERN)
    for seed in range(5):
        # A pipeline shares member lists and frames between the files that it reads.
        pipeline = Pipeline(
            max_dump_bytes=config.limits.max_dump_bytes,
            max_ranks=config.limits.max_ranks,
            min_open_age_ns=int(config.analysis.min_open_age_s * SECOND),
        )
        shuffled = random.Random(seed).sample(files, len(files))  # noqa: S311
        dump_set = final_set(pipeline.read_all(shuffled), settings)
        assert pipeline.analyse(dump_set, 0).to_dict() == expected


@pytest.mark.parametrize("name", SETS)
def test_number_of_processes(directories: Mapping[str, Path], name: str) -> None:
    """Read in two or three processes, each of which shares only its own files' values, the set says the same."""
    assert analyse(directories[name], jobs=2) == analyse(directories[name])
    assert analyse(directories[name], jobs=3) == analyse(directories[name])


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_seed_of_hashing(directories: Mapping[str, Path], seed: str) -> None:
    """However Python orders its sets, the diagnoses are the same."""
    command = [sys.executable, "-c", ANALYSE_EACH, *map(str, directories.values())]
    output = subprocess.check_output(command, env={**os.environ, "PYTHONHASHSEED": seed})

    assert json.loads(output) == [json.loads(json.dumps(analyse(path))) for path in directories.values()]


@pytest.mark.parametrize("name", SETS)
def test_padding_of_file_names(directories: Mapping[str, Path], tmp_path: Path, name: str) -> None:
    """`_dump_00009` is rank 9 like `_dump_9`, and sorts otherwise."""
    for path in directories[name].iterdir():
        rank = int(path.name.removeprefix("_dump_"))
        shutil.copy2(path, tmp_path / f"_dump_{rank:05d}")

    assert analyse(tmp_path) == analyse(directories[name]) | {"source": str(tmp_path)}
