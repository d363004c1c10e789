"""The dumps of real jobs with a known fault: what was injected is the truth, and the diagnosis must say it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from fr_exporter import Diagnosis
from fr_exporter.diagnosis import Cause
from tests.builders import SECOND
from tests.verdicts import assert_healthy, causes, diagnose

HANGS = [
    "01_missing_rank/gloo",
    "01_missing_rank/nccl_runahead",
    "02_type_mismatch/gloo",
    "02_type_mismatch/nccl",
    "03_size_mismatch/nccl_runahead",
    "05_p2p_unmatched/nccl_runahead",
    "06_cross_group/gloo",
    "06_cross_group/nccl_runahead",
    "07_killed_rank/gloo",
    "07_killed_rank/nccl",
    "10_cascade/gloo",
    "10_cascade/nccl",
    "variants_of_01/empty_file",
    "variants_of_01/json",
    "variants_of_01/only_active",
    "variants_of_01/partial_write",
    "variants_of_01/stale_mix",
    "variants_of_01/v2.4_torch2.5-2.7",
]
HEALTHY = ["08_healthy/gloo", "08_healthy/nccl", "08b_healthy_skewed/gloo"]

# What each kind of fault in truth.json may be called.
CAUSES = {
    "missing_rank": {Cause.HOST_STALL},
    "collective_type_mismatch": {Cause.COLLECTIVE_MISMATCH},
    "size_mismatch": {Cause.COLLECTIVE_MISMATCH},
    "p2p_unmatched": {Cause.P2P_UNMATCHED, Cause.HOST_STALL},
    "cross_group_deadlock": {Cause.ORDER_DEADLOCK},
    "missing_dump": {Cause.MISSING_DUMP},
}
UNREADABLE = {
    "variants_of_01/partial_write": [("nccl_trace_rank_4", "partial")],
    "variants_of_01/empty_file": [("nccl_trace_rank_2", "partial")],
}
STALE = {"variants_of_01/stale_mix": (1, 7)}


def torch_set(shared_dumps: Path, name: str, tmp_path: Path) -> tuple[Diagnosis, dict[str, Any]]:
    """Diagnose a copy of a set whose files have the mtimes they had; return the truth beside it."""
    folder = shared_dumps / "torch" / name
    truth = json.loads((folder / "truth.json").read_text())
    for file, mtime in truth["file_mtimes"].items():
        moment = int(mtime * SECOND)
        os.utime(shutil.copyfile(folder / file, tmp_path / file), ns=(moment, moment))
    return diagnose(tmp_path, pattern="nccl_trace_rank_*"), truth


def test_every_set_has_its_test(shared_dumps: Path) -> None:
    """The tables above name every set of the folder."""
    found = {str(path.parent.relative_to(shared_dumps / "torch")) for path in shared_dumps.glob("torch/*/*/truth.json")}
    assert found == {*HANGS, *HEALTHY}
    assert {path.name for path in (shared_dumps / "nvrx").iterdir() if path.is_dir()} == NVRX.keys()


@pytest.mark.parametrize("name", HANGS)
def test_torch_set_that_hangs(shared_dumps: Path, tmp_path: Path, name: str) -> None:
    """The suspects, the cause, the hung group and the missing dumps are those of the fault put in."""
    diagnosis, truth = torch_set(shared_dumps, name, tmp_path)

    assert diagnosis.verdict == "hang"
    # Rank 1 alone departs from the order of the rest; naming the pair is fair too.
    fair = [[1], [0, 1]] if truth["kind"] == "cross_group_deadlock" else [truth["suspects"]]
    assert diagnosis.suspect_ranks in fair
    assert diagnosis.cause in CAUSES[truth["kind"]]
    assert set(causes(diagnosis).values()) == {diagnosis.cause}
    # A rank that stopped altogether also holds up collectives, and those stand before a send.
    headlines = diagnosis.hung_process_groups[: None if truth["kind"] == "p2p_unmatched" else 1]
    descs = truth["hung_group_desc"].split(" + ")
    [hung] = [hung.group for hung in headlines if hung.group.desc in descs]
    assert set(hung.ranks or ()) >= set(truth["hung_group_ranks"])
    assert list(diagnosis.missing_ranks) == truth.get("missing_dumps", [])
    assert diagnosis.world_size == truth["world_size"]


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_torch_set(shared_dumps: Path, tmp_path: Path, name: str) -> None:
    """Nobody is stuck in a finished job, nor in a running one whose ranks were asked at different moments."""
    assert_healthy(torch_set(shared_dumps, name, tmp_path)[0])


@pytest.mark.parametrize("name", HANGS)
def test_only_broken_files_are_unreadable(shared_dumps: Path, tmp_path: Path, name: str) -> None:
    """The half-written and the empty file are named as partial; no other file of any set is left out."""
    diagnosis, _ = torch_set(shared_dumps, name, tmp_path)

    named = [(Path(entry.file).name, entry.result) for entry in diagnosis.unreadable_files]
    assert named == UNREADABLE.get(name, [])


@pytest.mark.parametrize("name", HANGS)
def test_only_leftovers_are_stale(shared_dumps: Path, tmp_path: Path, name: str) -> None:
    """Files of a run one day earlier are stale; no other file of any set is."""
    diagnosis, _ = torch_set(shared_dumps, name, tmp_path)

    assert diagnosis.stale_ranks == STALE.get(name, ())


NVRX = {
    "gpu_error_1st": ([12, 14], Cause.DEVICE_STALL, ["74"], 20537),
    "lock_gil_1st": ([9, 14], Cause.HOST_STALL, ["72"], 45265),
    "lock_gil_2nd": ([10, 15], Cause.HOST_STALL, ["73", "74"], 20947),
}


@pytest.mark.parametrize("name", NVRX)
def test_megatron_set(shared_dumps: Path, tmp_path: Path, name: str) -> None:
    """Faults injected on two ranks at once are both found, and the headline is the all_to_all that waits on them."""
    suspects, cause, groups, seq_id = NVRX[name]
    files = sorted((shared_dumps / "nvrx" / name).glob("_dump_*"))
    newest_ns = 0
    for file in files:
        entries = pickle.loads(file.read_bytes())["entries"]
        newest_ns = max([newest_ns, *(entry["time_created_ns"] for entry in entries)])
    dumped_ns = newest_ns + 60 * SECOND
    for file in files:
        os.utime(shutil.copyfile(file, tmp_path / file.name), ns=(dumped_ns, dumped_ns))

    diagnosis = diagnose(tmp_path)

    assert diagnosis.verdict == "hang"
    assert causes(diagnosis) == dict.fromkeys(suspects, cause)
    assert diagnosis.cause == cause
    headline = [hung for hung in diagnosis.hung_process_groups if hung.group.name in groups]
    assert list(diagnosis.hung_process_groups[: len(groups)]) == headline
    for hung in headline:
        assert hung.group.desc == "EXPERT_MODEL_PARALLEL_GROUP"
        assert (hung.operation, hung.kind, hung.collective_seq_id) == ("nccl:all_to_all", "collective", seq_id)
        assert set(hung.waiting_on) <= set(suspects)
    assert (diagnosis.missing_ranks, diagnosis.unreadable_files, diagnosis.world_size) == ((), (), 16)


def test_gpu_error_as_it_was_worked_out_by_hand(shared_dumps: Path, tmp_path: Path) -> None:
    """In group 74 ranks 13 and 15 wait on 12 and 14; each suspect's evidence names the call that its peer completed."""
    for file in (shared_dumps / "nvrx" / "gpu_error_1st").glob("_dump_*"):
        shutil.copyfile(file, tmp_path / file.name)

    diagnosis = diagnose(tmp_path)

    headline = diagnosis.hung_process_groups[0]
    assert (headline.group.ranks, headline.waiting_ranks, headline.waiting_on) == ((12, 13, 14, 15), (13, 15), (12, 14))
    evidence = {suspect.rank: suspect.evidence for suspect in diagnosis.suspects}
    assert "42806" in evidence[12]
    assert "13" in evidence[12]
    assert "15" in evidence[14]
