"""The shapes that people met in the field, F1 to F28, each rebuilt in numbers with the verdict that is right."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fr_exporter.diagnosis import Cause
from fr_exporter.simulate.formats import as_json, as_version
from tests.builders import SECOND, Dump, Job, as_collected, encode, encode_json, write
from tests.verdicts import assert_hang, assert_healthy, diagnose


@pytest.mark.parametrize("small", [range(40), range(64), range(3, 120, 4)])
def test_f01_two_sizes_of_one_all_reduce(tmp_path: Path, small: range) -> None:
    """F1: of 128 ranks some all-reduce [1025], others [262144] as call 39: the smaller camp, at a tie both."""
    job = Job(128, before=38)
    others = job.world.without(*small)
    job.collective(job.world, by=small, sizes=[[1025]], done=False)
    job.collective(job.world, by=others, sizes=[[262144]], done=False)
    dumps = job.dumps()
    for dump in dumps.values():
        dump["entries"][0]["frames"] = []

    diagnosis = diagnose(write(tmp_path, dumps, mtime_ns=job.now_ns + 60 * SECOND))

    tie = len(small) == len(others)
    assert_hang(diagnosis, Cause.COLLECTIVE_MISMATCH, job.world.ranks if tie else small, group=job.world, seq_id=39)
    [mismatch] = diagnosis.mismatches
    assert (mismatch.kind, mismatch.collective_seq_id) == ("size", 39)
    assert {camp.ranks for camp in mismatch.camps} == {tuple(small), tuple(others)}
    assert len(mismatch.camps[0].ranks) == max(len(small), len(others))


@pytest.mark.parametrize("odd", range(8))
@pytest.mark.parametrize("order", ["rising", "falling", "shuffled"])
def test_f02_one_odd_rank_of_eight(tmp_path: Path, odd: int, order: str) -> None:
    """F2: the one rank with another size is the suspect, whichever it is and in whatever order the files lie."""
    job = Job(8, before=38)
    job.collective(job.world, by=[odd], sizes=[[1025]], done=False)
    job.collective(job.world, by=job.world.without(odd), sizes=[[262144]], done=False)
    ranks = {
        "rising": list(range(8)),
        "falling": list(range(7, -1, -1)),
        "shuffled": random.Random(odd).sample(range(8), 8),  # noqa: S311
    }

    assert_hang(diagnose(job.write(tmp_path, ranks=ranks[order])), Cause.COLLECTIVE_MISMATCH, [odd])


def test_f03_host_between_prefix_and_rank(tmp_path: Path) -> None:
    """F3: `nccl_trace_rank_node02_5` and `…_node07_40` are ranks 5 and 40 on nodes node02 and node07."""
    job = Job(48)
    pipeline = job.group("9", "pp", [5, 40])
    job.collective(pipeline, times=3)
    job.collective(pipeline, by=[5])
    job.write(tmp_path, ranks=[5], name="nccl_trace_rank_node02_{rank}")
    job.write(tmp_path, ranks=[40], name="nccl_trace_rank_node07_{rank}")

    diagnosis = diagnose(tmp_path, pattern="nccl_trace_rank_*")

    assert {report.rank: report.node for report in diagnosis.ranks} == {5: "node02", 40: "node07"}
    assert_hang(diagnosis, Cause.HOST_STALL, [40], group=pipeline, seq_id=4)
    assert diagnosis.suspects[0].node == "node07"


def test_f04_subset_never_issued_a_coalesced_collective(tmp_path: Path) -> None:
    """F4: ranks 2 and 5 never issued the coalesced collective that the others are in."""
    job = Job(8)
    job.collective(job.world, times=2)
    job.coalesced(job.world, "_all_gather_base")
    job.coalesced(job.world, "_all_gather_base", by=job.world.without(2, 5))

    assert_hang(diagnose(job.write(tmp_path)), Cause.HOST_STALL, [2, 5], group=job.world, seq_id=4)


def test_f05_rings_that_begin_at_different_calls(tmp_path: Path) -> None:
    """F5: rank 0 shows 100 to 105, rank 1 103 to 106, all done: nobody is stuck, and position says nothing."""
    job = Job(2, before=99)
    job.collective(job.world, times=6)
    job.collective(job.world, by=[1], done=True)
    dumps = job.dumps()
    dumps[1]["entries"] = dumps[1]["entries"][3:]

    assert_healthy(diagnose(write(tmp_path, dumps, mtime_ns=job.now_ns + 60 * SECOND)))


@pytest.mark.parametrize("operation", ["nccl2:all_reduce", "hccl:all_gather", "weird:brand_new_op"])
def test_f06_unheard_of_backends_and_operations(tmp_path: Path, operation: str) -> None:
    """F6: names are open: a hung call of any backend and operation is analysed like any other."""
    job = Job(4)
    job.collective(job.world, operation, times=3)
    job.collective(job.world, operation, by=job.world.without(2))

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.HOST_STALL, [2], group=job.world, seq_id=4)
    assert diagnosis.hung_process_groups[0].operation == operation


def test_f07_counters_against_states(tmp_path: Path) -> None:
    """F7: every entry says completed, yet the counters say 50 issued and 49 done on all but rank 2, with 49/49."""
    job = Job(4, before=46)
    job.collective(job.world, times=3)
    job.collective(job.world, by=job.world.without(2), done=True)
    dumps = job.dumps()
    for rank in job.world.without(2):
        dumps[rank]["pg_status"]["0"]["last_completed_collective"] = 49
        dumps[rank]["entries"][-1]["retired"] = False

    diagnosis = diagnose(write(tmp_path, dumps, mtime_ns=job.now_ns + 60 * SECOND))

    assert_hang(diagnosis, Cause.HOST_STALL, [2], group=job.world, seq_id=50)


def test_f08_rank_that_raised_before_its_dump(tmp_path: Path) -> None:
    """F8: rank 0 waits in call 3 of a pair whose other rank left no dump."""
    job = Job(2)
    job.collective(job.world, times=2)
    job.collective(job.world, by=[0])

    diagnosis = diagnose(job.write(tmp_path, ranks=[0]))

    assert_hang(diagnosis, Cause.MISSING_DUMP, [1], group=job.world, seq_id=3)
    assert diagnosis.suspects[0].confidence in ("low", "medium")
    assert diagnosis.missing_ranks == (1,)


def test_f09_half_a_file_and_an_empty_one(tmp_path: Path) -> None:
    """F9: a file cut in half and an empty one are named, the six others analysed; whole, they are read."""
    job = Job(8)
    job.collective(job.world, times=3)
    job.collective(job.world, by=job.world.without(2))
    job.write(tmp_path)
    whole = (tmp_path / "_dump_6").read_bytes()
    mtime_ns = (tmp_path / "_dump_6").stat().st_mtime_ns
    for name, content in (("_dump_6", whole[: len(whole) // 2]), ("_dump_7", b"")):
        (tmp_path / name).write_bytes(content)
        os.utime(tmp_path / name, ns=(mtime_ns, mtime_ns))

    diagnosis = diagnose(tmp_path)

    assert_hang(diagnosis, Cause.HOST_STALL, [2], group=job.world)
    assert diagnosis.dumped_ranks == (0, 1, 2, 3, 4, 5)
    assert [Path(entry.file).name for entry in diagnosis.unreadable_files] == ["_dump_6", "_dump_7"]
    assert {entry.result for entry in diagnosis.unreadable_files} == {"partial"}

    assert diagnose(job.write(tmp_path)).unreadable_files == ()


def test_f10_idle_default_group_beside_the_hung_one(tmp_path: Path) -> None:
    """F10: default_pg idles at 6/6 everywhere; group 1 has 12/11 on ranks 0 to 2 and 11/11 on rank 3."""
    job = Job(4, before=6)
    group = job.group("1", "mesh_tp", range(4), before=10)
    job.collective(group)
    job.collective(group, by=[0, 1, 2])

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.HOST_STALL, [3], group=group, seq_id=12)
    assert [hung.group.name for hung in diagnosis.hung_process_groups] == ["1"]


def test_f11_everyone_arrived(tmp_path: Path) -> None:
    """F11: eight ranks, 120051 issued, 120048 done on each, the same calls: the group, no rank above the rest."""
    job = Job(8, before=120047)
    job.collective(job.world)
    job.collective(job.world, times=3, done=False)

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.COMMUNICATION_FAULT, job.world.ranks, group=job.world, seq_id=120049)
    assert {suspect.confidence for suspect in diagnosis.suspects} == {"low"}


def test_f12_nobody_is_guilty_for_running_ahead(tmp_path: Path) -> None:
    """F12: rank 7 stands idle after 182, the others are in 183 while their hosts are at 315 and at 317."""
    job = Job(8, before=181)
    job.collective(job.world)
    ahead = job.world.without(7)
    job.collective(job.world, by=ahead, times=133)
    job.collective(job.world, "_all_gather_base", by=[3, 4, 5, 6], times=2)

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.HOST_STALL, [7], group=job.world, seq_id=183)
    assert diagnosis.waiting_ranks == ahead
    assert diagnosis.mismatches == ()


def test_f13_one_broadcast_among_all_reduces(tmp_path: Path) -> None:
    """F13: one rank broadcasts [5056] as call 80078, seven all-reduce [2106881]."""
    job = Job(8, before=80077)
    job.collective(job.world, "broadcast", by=[5], sizes=[[5056]], done=False)
    job.collective(job.world, by=job.world.without(5), sizes=[[2106881]], done=False)

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.COLLECTIVE_MISMATCH, [5], group=job.world, seq_id=80078)
    operation = next(mismatch for mismatch in diagnosis.mismatches if mismatch.kind == "operation")
    assert [camp.ranks for camp in operation.camps] == [(0, 1, 2, 3, 4, 6, 7), (5,)]


def test_f14_rank_zero_reduces_while_the_others_gather(tmp_path: Path) -> None:
    """F14: rank 0 is in a reduce as call 3742816, the others in an _allgather_base: rank 0 is a rank like any other."""
    job = Job(8, before=3742815)
    job.collective(job.world, "reduce", by=[0], done=False)
    job.collective(job.world, "_allgather_base", by=job.world.without(0), done=False)

    assert_hang(diagnose(job.write(tmp_path)), Cause.COLLECTIVE_MISMATCH, [0], group=job.world, seq_id=3742816)


def test_f15_first_call_of_a_job(tmp_path: Path) -> None:
    """F15: nothing was ever done (-1), and rank 0 all-reduces twice the size of the others: rank 0, kind size."""
    job = Job(8)
    job.collective(job.world, by=[0], sizes=[[209715200]], done=False)
    job.collective(job.world, by=job.world.without(0), sizes=[[104857600]], done=False)

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.COLLECTIVE_MISMATCH, [0], group=job.world, seq_id=1)
    assert [mismatch.kind for mismatch in diagnosis.mismatches] == ["size"]
    assert {progress.last_completed for report in diagnosis.ranks for progress in report.progress} == {None}
    assert {progress.open_operations for report in diagnosis.ranks for progress in report.progress} == {1}


def test_f16_open_calls_pile_up_behind_one(tmp_path: Path) -> None:
    """F16: three ranks have 6139 issued and 6074 done: stuck in 6075, 65 calls open."""
    job = Job(3, before=6073)
    job.collective(job.world)
    job.collective(job.world, times=65, done=False)

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.COMMUNICATION_FAULT, [0, 1, 2], group=job.world, seq_id=6075)
    assert [report.progress[0].open_operations for report in diagnosis.ranks] == [65, 65, 65]


def test_f17_two_hundred_and_fifty_six_ranks(tmp_path: Path) -> None:
    """F17: as F11 with 256 ranks at 2398578 issued, 2398458 done."""
    job = Job(256, before=2398457)
    job.collective(job.world)
    job.collective(job.world, times=120, done=False)

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.COMMUNICATION_FAULT, range(256), group=job.world, seq_id=2398459)


def test_f18_gather_writes_on_its_root_alone(tmp_path: Path) -> None:
    """F18: in a gather only the root has outputs; with everyone arrived that is no mismatch."""
    job = Job(4)
    job.collective(job.world, times=2)
    job.collective(job.world, "gather", by=[0], output_sizes=[[4, 256]], done=False)
    job.collective(job.world, "gather", by=[1, 2, 3], output_sizes=[], done=False)

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.COMMUNICATION_FAULT, [0, 1, 2, 3], group=job.world, seq_id=3)
    assert diagnosis.mismatches == ()


def test_f19_all_to_all_with_uneven_splits(tmp_path: Path) -> None:
    """F19: in an all_to_all every rank may have sizes of its own."""
    job = Job(4)
    job.collective(job.world, times=2)
    for rank in job.world.ranks:
        sizes, outputs = [[4027 + rank, 5120]], [[4096 - rank, 5120]]
        job.collective(job.world, "all_to_all", by=[rank], sizes=sizes, output_sizes=outputs, done=False)

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.COMMUNICATION_FAULT, [0, 1, 2, 3], group=job.world, seq_id=3)
    assert diagnosis.mismatches == ()


def test_f20_rank_zero_has_no_dump(tmp_path: Path) -> None:
    """F20: of seven ranks six are in broadcast 4, and rank 0 left no dump."""
    job = Job(7)
    job.collective(job.world, "broadcast", times=3)
    job.collective(job.world, "broadcast", by=job.world.without(0), done=False)

    diagnosis = diagnose(job.write(tmp_path, ranks=range(1, 7)))

    assert_hang(diagnosis, Cause.MISSING_DUMP, [0], group=job.world, seq_id=4)
    assert diagnosis.missing_ranks == (0,)


def running_job(tmp_path: Path, ranks: list[int], *, asked_late_s: float = 0) -> Path:
    """Write dumps of a running job: rank r is asked when it is in call 20 + 3r, issued 0.2 s before."""
    job = Job(4, before=18)
    mtimes = {}
    for seq_id in range(19, 30):
        for rank in job.world.ranks:
            if seq_id <= 20 + 3 * rank:
                job.collective(job.world, by=[rank], done=seq_id < 20 + 3 * rank)
                mtimes[rank] = job.now_ns + int((0.2 + asked_late_s) * SECOND)
        job.sleep(0.3)
    return write(tmp_path, job.dumps(ranks=ranks), mtime_ns=mtimes)


def test_f21_healthy_job_asked_for_dumps(tmp_path: Path) -> None:
    """F21: ranks a few calls apart, each asked 0.2 s after it issued its open call: in flight, not stuck."""
    assert_healthy(diagnose(running_job(tmp_path, [0, 1, 2, 3])))


def test_f21_young_calls_while_a_rank_has_no_dump(tmp_path: Path) -> None:
    """F21: as before with rank 3's dump absent: a crash dumps at once, so a young call is not excused."""
    diagnosis = diagnose(running_job(tmp_path, [0, 1, 2]))

    assert diagnosis.verdict == "hang"
    assert diagnosis.missing_ranks == (3,)


def test_f21_calls_without_a_true_dump_time(tmp_path: Path) -> None:
    """F21: where the files' times were lost (a copy, a month later) age excuses nothing, and the report says so."""
    diagnosis = diagnose(running_job(tmp_path, [0, 1, 2, 3], asked_late_s=30 * 86400))

    assert diagnosis.verdict == "hang"
    assert any("would look the same" in warning for warning in diagnosis.warnings)


@pytest.mark.parametrize("times", ["kept", "lost"])
def test_f22_leftovers_of_a_larger_attempt(tmp_path: Path, times: str) -> None:
    """F22: files of ranks 4 to 7 of yesterday's 8-rank attempt are stale, by time or by content."""
    former = Job(8)
    former.collective(former.world, times=5)
    former.collective(former.world, by=former.world.without(6))
    job = Job(4)
    job.sleep(86400)
    job.collective(job.world, times=5)
    job.collective(job.world, by=job.world.without(1))
    now_ns = job.now_ns + 60 * SECOND
    left_ns = now_ns if times == "lost" else former.now_ns + 60 * SECOND
    name = "nccl_trace_rank_{rank}"
    write(tmp_path, former.dumps(ranks=range(4, 8)), name=name, mtime_ns=left_ns)
    job.write(tmp_path, name=name)

    diagnosis = diagnose(tmp_path, pattern="nccl_trace_rank_*")

    assert_hang(diagnosis, Cause.HOST_STALL, [1], group=job.world, seq_id=6)
    assert diagnosis.dumped_ranks == (0, 1, 2, 3)
    assert diagnosis.stale_ranks == (4, 5, 6, 7)


def test_f23_two_versions_side_by_side(tmp_path: Path) -> None:
    """F23: ranks that dump 2.9 and ranks that dump 2.10 are read together."""
    job = Job(4)
    job.collective(job.world, times=3)
    job.collective(job.world, by=job.world.without(3))
    dumps = {rank: as_version(dump, "2.9") if rank % 2 else dump for rank, dump in job.dumps().items()}

    diagnosis = diagnose(write(tmp_path, dumps, mtime_ns=job.now_ns + 60 * SECOND))

    assert_hang(diagnosis, Cause.HOST_STALL, [3], group=job.world, seq_id=4)
    assert diagnosis.dump_versions == ("2.9", "2.10")


@pytest.mark.parametrize(
    ("newer", "older"),
    [("nccl_trace_rank_0.json", "nccl_trace_rank_0"), ("nccl_trace_rank_0", "nccl_trace_rank_0.json")],
)
def test_f24_two_files_of_one_rank(tmp_path: Path, newer: str, older: str) -> None:
    """F24: of rank 0's two files the newer counts (there it waits in call 4), and a warning names the other."""
    job = Job(2)
    job.collective(job.world, times=3)
    before = job.dumps(ranks=[0])[0]
    job.collective(job.world, by=[0])
    job.write(tmp_path, name="nccl_trace_rank_{rank}", ranks=[1])
    for name, dump, late_s in ((older, before, 50), (newer, job.dumps(ranks=[0])[0], 60)):
        spell: Callable[[Dump], bytes] = (lambda dump: encode_json(as_json(dump))) if name.endswith("n") else encode
        write(tmp_path, {0: dump}, name=name, mtime_ns=job.now_ns + late_s * SECOND, encoder=spell)

    diagnosis = diagnose(tmp_path, pattern="nccl_trace_rank_*")

    assert_hang(diagnosis, Cause.HOST_STALL, [1], group=job.world, seq_id=4)
    assert any(re.search(rf"{re.escape(older)}(?!\.json)", warning) for warning in diagnosis.warnings)


def test_f25_counters_alone_that_differ(tmp_path: Path) -> None:
    """F25: no dump has entries and one group's counters read 10, 10, 9, 10: too little evidence, and rank 2 lags."""
    job = Job(4, before=9)
    job.collective(job.world, by=job.world.without(2), done=True)
    dumps = job.dumps()
    for dump in dumps.values():
        dump["entries"] = []

    diagnosis = diagnose(write(tmp_path, dumps, mtime_ns=job.now_ns + 60 * SECOND))

    assert diagnosis.verdict == "inconclusive"
    assert re.search(r"\brank 2\b", diagnosis.summary)


class RunsACommand:
    """Unpickles as a call of `os.system`."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


def test_f26_dump_that_would_run_a_command(tmp_path: Path) -> None:
    """F26: a pickle that calls `os.system` is rejected and named, nothing runs, and the rest is analysed."""
    job = Job(4)
    job.collective(job.world, times=3)
    job.collective(job.world, by=job.world.without(2))
    dumps: dict[int, object] = dict(job.dumps())
    marker = tmp_path / "ran"
    dumps[3] = RunsACommand(f"touch {marker}")

    diagnosis = diagnose(write(tmp_path, dumps, mtime_ns=job.now_ns + 60 * SECOND))

    assert not marker.exists()
    assert_hang(diagnosis, Cause.HOST_STALL, [2], group=job.world, seq_id=4)
    [unreadable] = diagnosis.unreadable_files
    assert (Path(unreadable.file).name, unreadable.result) == ("_dump_3", "rejected")


def test_f27_record_ids_are_each_ranks_own(tmp_path: Path) -> None:
    """F27: one tensor-parallel group's records start at 1000, the other's at 50; rank 3 lacks its last two calls."""
    job = Job(4)
    first, second = job.group("1", "tp", [0, 1]), job.group("2", "tp", [2, 3])
    job.record_ids = {0: 1000, 1: 1000, 2: 50, 3: 50}
    job.collective(first, times=6)
    job.collective(second, times=4)
    job.collective(second, by=[2], times=2)

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.HOST_STALL, [3], group=second, seq_id=5)


def test_f28_health_check_of_the_suspect(tmp_path: Path) -> None:
    """F28: the collector found the GPU of the suspect failed: its evidence says so."""
    job = Job(4)
    job.collective(job.world, times=3)
    job.collective(job.world, by=job.world.without(1))
    dumps = {rank: as_collected(dump, gpu="Failed" if rank == 1 else "Healthy") for rank, dump in job.dumps().items()}
    mtime_ns = job.now_ns + 60 * SECOND
    write(tmp_path, dumps, name="_dump_{rank}.json", mtime_ns=mtime_ns, encoder=encode_json)

    diagnosis = diagnose(tmp_path)

    assert_hang(diagnosis, Cause.HOST_STALL, [1], group=job.world, seq_id=4)
    [suspect] = diagnosis.suspects
    assert dict(suspect.health) == {"gpu": "Failed", "nic": "Healthy"}
    assert re.search(r"(?i)gpu.*failed", suspect.evidence)
