"""One built hang for each way in which ranks make others wait, with the truth argued from what the ranks did."""

from __future__ import annotations

from pathlib import Path

import pytest

from fr_exporter.diagnosis import Cause
from tests.builders import SECOND, Group, Job, write
from tests.verdicts import assert_hang, causes, diagnose


def test_rank_that_no_longer_sees_completions(tmp_path: Path) -> None:
    """Ranks 0 to 2 completed call 5, so it took place; rank 3, which issued it as well, still has it open.

    Its device stopped. That the others now wait in call 6, which rank 3 issued too, is the consequence.
    """
    job = Job(4)
    job.collective(job.world, times=4)
    job.collective(job.world, done=[0, 1, 2])
    job.collective(job.world)

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.DEVICE_STALL, [3], group=job.world)
    assert diagnosis.suspects[0].confidence == "high"


def test_stall_shows_in_a_call_behind_the_front(tmp_path: Path) -> None:
    """Rank 1's front is a pair call that nobody completed, but rank 3 completed a later call that rank 1 has open.

    A device that runs completes both or neither, in the end: rank 1's does not, and rank 0 waits on it.
    """
    job = Job(4)
    pair, other = job.group("1", "tp", [0, 1]), job.group("2", "dp", [1, 3])
    job.collective(job.world, times=2)
    job.collective(pair, done=False)
    job.collective(other, done=[3])
    job.collective(job.world, by=[2, 3])

    assert causes(diagnose(job.write(tmp_path))) == {1: Cause.DEVICE_STALL}


def test_root_of_a_broadcast_finishes_alone(tmp_path: Path) -> None:
    """Rank 0 broadcast and went on, as a root may; 1 and 2 wait for rank 3, which never issued the broadcast."""
    job = Job(4)
    job.collective(job.world, times=4)
    job.collective(job.world, "broadcast", by=[0, 1, 2], done=[0])
    job.collective(job.world, by=[0])

    assert_hang(diagnose(job.write(tmp_path)), Cause.HOST_STALL, [3], group=job.world, seq_id=5)


def test_device_that_did_not_start_what_the_others_started(tmp_path: Path) -> None:
    """With timing on, all issued call 4 and all but rank 2 started it: rank 2's device is held by something else."""
    job = Job(4, timing=True)
    job.collective(job.world, times=3)
    job.collective(job.world, done=False, started=[0, 1, 3])

    assert_hang(diagnose(job.write(tmp_path)), Cause.DEVICE_STALL, [2], group=job.world, seq_id=4)


def test_all_started_is_nobodys_stall(tmp_path: Path) -> None:
    """With timing on and everyone in the call, the link between them is at fault, and no rank above the rest."""
    job = Job(4, timing=True)
    job.collective(job.world, times=3)
    job.collective(job.world, done=False, started=[0, 1, 2, 3])

    assert_hang(diagnose(job.write(tmp_path)), Cause.COMMUNICATION_FAULT, [0, 1, 2, 3], group=job.world, seq_id=4)


def test_one_rank_that_went_on_alone(tmp_path: Path) -> None:
    """Three ranks are in call 5; rank 3 says it is done and is in call 6, which none of the three has issued.

    Three devices do not stop at once: the one that went past the call is the odd one, though not for certain.
    """
    job = Job(4)
    job.collective(job.world, times=4)
    job.collective(job.world, done=[3])
    job.collective(job.world, by=[3])

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.DESYNC, [3])
    assert diagnosis.suspects[0].confidence == "low"


def test_dtype_that_differs(tmp_path: Path) -> None:
    """Rank 2 reduces BFloat16 where the others reduce Float: the sizes agree, the bytes do not."""
    job = Job(4)
    job.collective(job.world, times=3)
    job.collective(job.world, by=[2], dtype="BFloat16", done=False)
    job.collective(job.world, by=job.world.without(2), done=False)

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.COLLECTIVE_MISMATCH, [2], group=job.world, seq_id=4)
    assert [mismatch.kind for mismatch in diagnosis.mismatches] == ["dtype"]


def test_mismatch_before_device_stall(tmp_path: Path) -> None:
    """Rank 1 issued another size, and so its device never starts what the others' did: the mismatch is the cause."""
    job = Job(4, timing=True)
    job.collective(job.world, times=3)
    job.collective(job.world, by=[1], sizes=[[300]], done=False)
    job.collective(job.world, by=job.world.without(1), done=False, started=[0, 2, 3])

    assert_hang(diagnose(job.write(tmp_path)), Cause.COLLECTIVE_MISMATCH, [1], group=job.world, seq_id=4)


@pytest.mark.parametrize("blocks", [True, False])
def test_two_ranks_in_opposite_order(tmp_path: Path, blocks: bool) -> None:
    """Rank 0 calls group 1 before group 2, rank 1 the other way round: neither is more at fault than the other.

    That holds where the host blocks in its first call, and where it goes on to issue the second.
    """
    job = Job(2)
    first, second = job.group("1", "tp", [0, 1]), job.group("2", "ep", [0, 1])
    for group in (first, second, first, second):
        job.collective(group)
    job.collective(first, by=[0], done=False)
    job.collective(second, by=[1], done=False)
    if not blocks:
        job.collective(second, by=[0], done=False)
        job.collective(first, by=[1], done=False)

    assert_hang(diagnose(job.write(tmp_path)), Cause.ORDER_DEADLOCK, [0, 1])


def test_one_rank_of_four_in_opposite_order(tmp_path: Path) -> None:
    """Three ranks call group 1 and then group 2; rank 2 does the reverse, so it departs from the rest."""
    job = Job(4)
    first, second = job.group("1", "tp", range(4)), job.group("2", "ep", range(4))
    for group in (first, second, first, second):
        job.collective(group)
    job.collective(first, by=[0, 1, 3])
    job.collective(second, by=[2])

    assert_hang(diagnose(job.write(tmp_path)), Cause.ORDER_DEADLOCK, [2])


def _three_steps_and_a_send(job: Job, pipeline: Group) -> None:
    """Run three good steps, in each rank 0 sends to rank 1 and all reduce; then rank 0 sends once more."""
    for _ in range(3):
        job.send(pipeline, 0, 1)
        job.recv(pipeline, 1, 0)
        job.collective(job.world)
    job.send(pipeline, 0, 1)


def test_peer_that_went_past_the_recv(tmp_path: Path) -> None:
    """Rank 1 did the call that rank 0 issued after its send, and has nothing open: it left out the recv.

    Had its host merely stopped, it would not have issued what comes later.
    """
    job = Job(2)
    pipeline = job.group("1", "pp", [0, 1])
    _three_steps_and_a_send(job, pipeline)
    job.collective(job.world)

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.P2P_UNMATCHED, [1], group=pipeline)
    assert (diagnosis.hung_process_groups[0].kind, diagnosis.hung_process_groups[0].p2p_seq_id) == ("p2p", 4)


def test_peer_that_waits_behind_the_recv_it_left_out(tmp_path: Path) -> None:
    """Rank 0 is in a send that rank 1 has no recv for; rank 1 and all others wait for rank 0 in the next all_reduce."""
    job = Job(4)
    pipeline = job.group("1", "pp", [0, 1])
    _three_steps_and_a_send(job, pipeline)
    job.collective(job.world, by=[1, 2, 3])

    diagnosis = diagnose(job.write(tmp_path))

    assert (diagnosis.verdict, diagnosis.cause) == ("hang", Cause.P2P_UNMATCHED), diagnosis.summary
    assert 1 in diagnosis.suspect_ranks
    assert {2, 3}.isdisjoint(diagnosis.suspect_ranks)
    assert diagnosis.hung_process_groups[0].group.name == pipeline.name


def test_peer_that_stopped_before_the_recv(tmp_path: Path) -> None:
    """Rank 1 issued nothing since the last step that both finished: its host stopped, the recv is not at fault."""
    job = Job(2)
    pipeline = job.group("1", "pp", [0, 1])
    for _ in range(3):
        job.send(pipeline, 0, 1)
        job.recv(pipeline, 1, 0)
    job.send(pipeline, 0, 1)

    assert_hang(diagnose(job.write(tmp_path)), Cause.HOST_STALL, [1], group=pipeline, seq_id=4)


def test_two_ranks_that_both_send(tmp_path: Path) -> None:
    """Each is in a send and neither posted a recv: both, by whichever name."""
    job = Job(2)
    pipeline = job.group("1", "pp", [0, 1])
    job.send(pipeline, 0, 1)
    job.recv(pipeline, 1, 0)
    job.send(pipeline, 0, 1)
    job.send(pipeline, 1, 0)

    diagnosis = diagnose(job.write(tmp_path))

    assert diagnosis.verdict == "hang"
    assert diagnosis.suspect_ranks == [0, 1]
    assert diagnosis.cause in (Cause.P2P_UNMATCHED, Cause.ORDER_DEADLOCK)


def test_send_and_recv_that_both_stand(tmp_path: Path) -> None:
    """A send and its recv are both posted and in front, and nothing moves: the link of this pair."""
    job = Job(4)
    pipeline = job.group("1", "pp", range(4))
    for source, destination in ((0, 1), (1, 2), (2, 3)):
        job.send(pipeline, source, destination)
        job.recv(pipeline, destination, source)
    job.send(pipeline, 1, 2, done=False)
    job.recv(pipeline, 2, 1, done=False)
    job.recv(pipeline, 3, 2)

    assert_hang(diagnose(job.write(tmp_path)), Cause.COMMUNICATION_FAULT, [1, 2], group=pipeline)


def test_two_culprits_with_causes_of_their_own(tmp_path: Path) -> None:
    """Rank 1's host stopped before its pair's call; rank 3 has a call open that rank 2 completed."""
    job = Job(4)
    left, right = job.group("1", "tp", [0, 1]), job.group("2", "tp", [2, 3])
    for group in (left, right, job.world):
        job.collective(group, times=2)
    job.collective(left, by=[0])
    job.collective(right, done=[2])
    job.collective(right)
    job.collective(job.world, by=[0, 2, 3])

    diagnosis = diagnose(job.write(tmp_path))

    assert diagnosis.verdict == "hang"
    assert causes(diagnosis) == {1: Cause.HOST_STALL, 3: Cause.DEVICE_STALL}


def test_victims_of_victims(tmp_path: Path) -> None:
    """Rank 7 stopped in its tensor-parallel group; its group, their pipeline peers and the world pile up behind it."""
    job = Job(8)
    tp = [job.group("1", "tp", [0, 1, 2, 3]), job.group("2", "tp", [4, 5, 6, 7])]
    pp = [job.group(str(3 + stage), "pp", [stage, stage + 4]) for stage in range(4)]
    for group in (*tp, *pp, job.world):
        job.collective(group, times=2)
    job.collective(tp[0])
    job.collective(tp[1], by=[4, 5, 6])
    for stage in range(3):
        job.recv(pp[stage], stage, stage + 4)
    job.collective(job.world, by=[3])

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.HOST_STALL, [7], group=tp[1], seq_id=3)
    assert diagnosis.waiting_ranks == [0, 1, 2, 3, 4, 5, 6]


def test_call_that_timed_out_is_not_young(tmp_path: Path) -> None:
    """The watchdog retired the call without its completion, a second after it was issued: it is stuck at any age."""
    job = Job(2)
    job.collective(job.world, times=2)
    job.collective(job.world, by=[0])
    dumps = job.dumps()
    dumps[0]["entries"][-1].update(retired=True, timeout_ms=1000)

    diagnosis = diagnose(write(tmp_path, dumps, mtime_ns=job.now_ns + SECOND))

    assert_hang(diagnosis, Cause.HOST_STALL, [1], group=job.world, seq_id=3)


def test_send_that_the_peer_has_received(tmp_path: Path) -> None:
    """Rank 1 completed the recv of rank 0's second send, so that was sent; rank 0 still has it open.

    Rank 0's device stopped, or no longer sees completions. Rank 1, which has nothing open, made nobody wait.
    """
    job = Job(2)
    pair = job.group("1", "pp", [0, 1])
    for done in (True, False):
        job.send(pair, 0, 1, done=done)
        job.recv(pair, 1, 0, done=True)

    diagnosis = diagnose(job.write(tmp_path))

    assert causes(diagnosis) == {0: Cause.DEVICE_STALL}
    assert diagnosis.suspects[0].waiting_ranks == ()


def test_first_call_of_a_device_that_never_started(tmp_path: Path) -> None:
    """With timing on three ranks started the first call; rank 2, whose device never ran, shows no start at all.

    It completed nothing, so nothing went by that would show whether it records starts: as all its peers do.
    """
    job = Job(4, timing=True)
    job.collective(job.world, done=False, started=[0, 1, 3])

    assert causes(diagnose(job.write(tmp_path))) == {2: Cause.DEVICE_STALL}


def test_broadcast_that_one_rank_alone_is_left_in(tmp_path: Path) -> None:
    """All issued the broadcast and all but rank 3 are through: nobody else is said to be in it."""
    job = Job(4)
    job.collective(job.world, times=3)
    job.collective(job.world, "broadcast", done=[0, 1, 2])

    diagnosis = diagnose(job.write(tmp_path))

    assert causes(diagnosis) == {3: Cause.COMMUNICATION_FAULT}
    assert "which ranks 0-2 issued too and left" in diagnosis.suspects[0].evidence


def test_each_rank_at_another_call(tmp_path: Path) -> None:
    """Rank r has r calls done and one open, for 1,500 ranks: each but the last has one open that a peer completed.

    Work that grew with ranks times ranks times ranks would not end within this test's patience.
    """
    world_size = 1500
    job = Job(world_size)
    job.collective(job.world)
    dumps = job.dumps()
    for rank, dump in dumps.items():
        dump["entries"][0].update(collective_seq_id=rank + 1, state="scheduled")
        counters = {"last_enqueued_collective": rank + 1, "last_completed_collective": rank or -1}
        dump["pg_status"]["0"].update(counters)

    diagnosis = diagnose(write(tmp_path, dumps, mtime_ns=job.now_ns + 60 * SECOND))

    assert causes(diagnosis) == dict.fromkeys(range(world_size - 1), Cause.DEVICE_STALL)


def test_start_of_a_send_is_not_that_of_a_collective(tmp_path: Path) -> None:
    """Rank 2 started recv 3 of the group and did not start collective 1, which the others are in."""
    job = Job(4, timing=True)
    group = job.group("1", "pp", range(4))
    for _ in range(3):
        job.send(group, 3, 2)
        job.recv(group, 2, 3)
    job.collective(group, done=False, started=[0, 1, 3])
    dumps = job.dumps()
    assert dumps[2]["pg_status"]["1"]["last_started_collective"] == 3

    assert causes(diagnose(job.write(tmp_path))) == {2: Cause.DEVICE_STALL}
