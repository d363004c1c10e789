"""Ranks without a usable dump, and directories that hold one node's ranks only."""

from __future__ import annotations

from pathlib import Path

from fr_exporter.diagnosis import Cause
from tests.builders import SECOND, Job, write
from tests.verdicts import assert_hang, assert_healthy, causes, diagnose


def waiting_world() -> Job:
    """Return a job of two nodes of four ranks whose first node waits in a call that the second never issued."""
    job = Job(8)
    job.collective(job.world, times=3)
    job.collective(job.world, by=[0, 1, 2, 3])
    return job


def test_whole_node_without_dumps(tmp_path: Path) -> None:
    """Ranks 0 to 3 wait in call 4 and ranks 4 to 7 left nothing: the node is gone."""
    diagnosis = diagnose(waiting_world().write(tmp_path, ranks=range(4)))

    assert_hang(diagnosis, Cause.MISSING_DUMP, [4, 5, 6, 7], seq_id=4)
    assert diagnosis.missing_ranks == (4, 5, 6, 7)


def test_ranks_missing_from_groups_of_their_own(tmp_path: Path) -> None:
    """Ranks 2 and 3 left nothing, and each is lacked by one rank alone: half of the job gone is weak evidence."""
    job = Job(4)
    pairs = job.group("1", "pp", [0, 2]), job.group("2", "pp", [1, 3])
    for pair in pairs:
        job.collective(pair, times=2)
        job.collective(pair, done=False)

    diagnosis = diagnose(job.write(tmp_path, ranks=[0, 1]))

    assert_hang(diagnosis, Cause.MISSING_DUMP, [2, 3])
    assert {suspect.confidence for suspect in diagnosis.suspects} == {"low"}


def test_files_that_look_like_one_nodes_are_said_to(tmp_path: Path) -> None:
    """An aligned half of the world and nothing else may be a node's own directory: the report must say so."""
    diagnosis = diagnose(waiting_world().write(tmp_path, ranks=range(4)))

    assert any("node" in warning for warning in diagnosis.warnings)


def test_files_of_all_ranks_look_like_no_node(tmp_path: Path) -> None:
    """With the files of all ranks there is nothing to warn of."""
    assert diagnose(waiting_world().write(tmp_path)).warnings == ()


def test_unknown_rank_in_an_explained_call_is_a_victim(tmp_path: Path) -> None:
    """Rank 1's host stopped, and ranks 4 and 5 wait for it in a call of the world. Rank 3 waits for rank 2.

    Rank 2's file is broken. As a member of the world it is held up by rank 1 like the others: nothing says that it is
    at fault itself.
    """
    job = Job(6)
    left, right = job.group("1", "tp", [0, 1]), job.group("2", "tp", [2, 3])
    for group in (left, right, job.world):
        job.collective(group, times=2)
    job.collective(left, by=[0])
    job.collective(job.world, by=[4, 5])
    job.collective(right, by=[3])
    job.write(tmp_path)
    (tmp_path / "_dump_2").write_bytes(b"")

    diagnosis = diagnose(tmp_path)

    assert_hang(diagnosis, Cause.HOST_STALL, [1])
    assert [Path(entry.file).name for entry in diagnosis.unreadable_files] == ["_dump_2"]


def test_unknown_rank_that_nothing_explains_is_named(tmp_path: Path) -> None:
    """Rank 1's host stopped in one pair; in another, which shares no call with it, rank 3 waits for absent rank 2."""
    job = Job(4)
    left, right = job.group("1", "tp", [0, 1]), job.group("2", "tp", [2, 3])
    for group in (left, right):
        job.collective(group, times=2)
    job.collective(left, by=[0])
    job.collective(right, by=[3])

    diagnosis = diagnose(job.write(tmp_path, ranks=[0, 1, 3]))

    assert {suspect.rank: suspect.cause for suspect in diagnosis.suspects} == {
        1: Cause.HOST_STALL,
        2: Cause.MISSING_DUMP,
    }


def test_absent_rank_that_nobody_waits_for_is_no_suspect(tmp_path: Path) -> None:
    """Rank 3 left no dump, but the call that hangs is one of ranks 0 and 1: it is missing and not suspected."""
    job = Job(4)
    left = job.group("1", "tp", [0, 1])
    job.collective(job.world, times=2)
    job.collective(left, times=2)
    job.collective(left, by=[0])

    diagnosis = diagnose(job.write(tmp_path, ranks=[0, 1, 2]))

    assert_hang(diagnosis, Cause.HOST_STALL, [1], group=left, seq_id=3)
    assert diagnosis.missing_ranks == (3,)


def test_world_size_names_ranks_that_no_dump_lists(tmp_path: Path) -> None:
    """Told that the world has 4 ranks, the diagnosis misses the two that no group of these dumps mentions."""
    job = Job(2)
    job.collective(job.world, times=2)

    assert diagnose(job.write(tmp_path), world_size=4).missing_ranks == (2, 3)


def test_node_that_waits_on_other_nodes(tmp_path: Path) -> None:
    """Everything here waits on ranks that dump elsewhere: no verdict from here, and nobody is suspected."""
    diagnosis = diagnose(waiting_world().write(tmp_path, ranks=range(4)), scope="node")

    assert (diagnosis.verdict, diagnosis.suspect_ranks) == ("inconclusive", [])
    assert "waiting on ranks outside this node" in diagnosis.summary.lower()
    assert diagnosis.remote_ranks == (4, 5, 6, 7)
    assert diagnosis.missing_ranks == ()
    assert diagnosis.waiting_ranks == [0, 1, 2, 3]


def test_node_with_the_culprit_on_it(tmp_path: Path) -> None:
    """Rank 2 of this node did not arrive, which the node's own dumps show."""
    job = Job(8)
    job.collective(job.world, times=3)
    job.collective(job.world, by=job.world.without(2))

    diagnosis = diagnose(job.write(tmp_path, ranks=range(4)), scope="node")

    assert_hang(diagnosis, Cause.HOST_STALL, [2], group=job.world, seq_id=4)


def test_node_where_nobody_is_stuck(tmp_path: Path) -> None:
    """Remote ranks are unknown, but here everything is done."""
    job = Job(8)
    job.collective(job.world, times=3)

    assert_healthy(diagnose(job.write(tmp_path, ranks=range(4, 8)), scope="node"))


def test_running_job_with_a_dump_missing(tmp_path: Path) -> None:
    """All calls are a second old, and ranks got as far as each was when asked; rank 3 left no dump.

    A crash dumps at once, so age does not excuse the job: rank 3 is named. But that rank 1 had completed a call which
    rank 0 was still in says only that it was asked later.
    """
    job = Job(4)
    pair = job.group("1", "tp", [0, 1])
    job.collective(job.world, times=5)
    job.collective(pair, done=[1])
    job.collective(job.world, by=[1, 2])
    dumps = job.dumps(ranks=[0, 1, 2])

    young = diagnose(write(tmp_path, dumps, mtime_ns=job.now_ns + SECOND))
    assert_hang(young, Cause.MISSING_DUMP, [3])

    old = diagnose(write(tmp_path, dumps, mtime_ns=job.now_ns + 60 * SECOND))
    assert causes(old)[0] == Cause.DEVICE_STALL


def test_absent_rank_beside_a_seen_culprit_is_doubtful(tmp_path: Path) -> None:
    """Rank 0's host stopped. Rank 5, of another group, left no dump: it may wait for rank 0 itself."""
    job = Job(6)
    groups = job.group("1", "tp", [0, 1, 2]), job.group("2", "tp", [3, 4, 5])
    job.collective(job.world, times=3)
    job.collective(groups[0], by=[1, 2])
    job.collective(groups[1], by=[3, 4])

    diagnosis = diagnose(job.write(tmp_path, ranks=range(5)))

    assert causes(diagnosis) == {0: Cause.HOST_STALL, 5: Cause.MISSING_DUMP}
    assert {suspect.rank: suspect.confidence for suspect in diagnosis.suspects} == {0: "high", 5: "low"}
    assert diagnosis.cause == Cause.HOST_STALL


def test_order_shows_although_a_victim_left_no_dump(tmp_path: Path) -> None:
    """Rank 2 issued two calls in the other order than ranks 0 and 1; rank 3's dump is lost, and explains nothing."""
    job = Job(4)
    tp = job.group("1", "tp", range(4))
    for _ in range(5):
        job.collective(tp)
        job.collective(job.world)
    job.collective(tp, by=[0, 1, 3])
    job.collective(job.world, by=[2])

    assert_hang(diagnose(job.write(tmp_path, ranks=range(3))), Cause.ORDER_DEADLOCK, [2])
