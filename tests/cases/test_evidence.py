"""What a dump does and does not prove: states, counters, rings that forget, and files that say little."""

from __future__ import annotations

from pathlib import Path

import pytest

from fr_exporter.diagnosis import Cause
from fr_exporter.simulate.formats import UNVERSIONED, as_json, as_version
from tests.builders import SECOND, Dump, Job, as_torchcomms, encode, encode_json, write
from tests.verdicts import assert_hang, assert_healthy, diagnose


def write_late(tmp_path: Path, job: Job, dumps: dict[int, Dump]) -> Path:
    """Write changed dumps of a job a minute from its last call."""
    return write(tmp_path, dumps, mtime_ns=job.now_ns + 60 * SECOND)


@pytest.mark.parametrize("version", ["2.10", "2.9", "2.4", "2.1", "1.4"])
def test_verdict_does_not_depend_on_the_version(tmp_path: Path, version: str) -> None:
    """From 1.4 on every version tells members and sequence IDs, with counters or without them."""
    job = Job(4)
    tp = job.group("1", "tp", [2, 3])
    job.collective(job.world, times=3)
    job.collective(tp, times=2)
    job.collective(tp, by=[2])
    job.collective(job.world, by=[0, 1])
    dumps = {rank: as_version(dump, version) for rank, dump in job.dumps().items()}

    diagnosis = diagnose(write(tmp_path, dumps, mtime_ns=job.now_ns + 60 * SECOND))

    assert diagnosis.verdict == "hang"
    assert (diagnosis.suspect_ranks, diagnosis.cause) == ([3], Cause.HOST_STALL)
    assert diagnosis.hung_process_groups[0].group.ranks == (2, 3)


def test_json_tells_what_the_pickle_tells(tmp_path: Path) -> None:
    """The JSON form, without frames and with counters as strings, gives the same suspects."""
    job = Job(4)
    job.collective(job.world, times=3)
    job.collective(job.world, by=job.world.without(0))
    dumps = {rank: as_json(dump) for rank, dump in job.dumps().items()}
    write(tmp_path, dumps, name="_dump_{rank}.json", mtime_ns=job.now_ns + 60 * SECOND, encoder=encode_json)

    assert_hang(diagnose(tmp_path), Cause.HOST_STALL, [0], group=job.world, seq_id=4)


def test_torchcomms_counts_over_all_communicators(tmp_path: Path) -> None:
    """With one sequence over two groups and no counters, the calls of a group still tell that rank 3 lacks one."""
    job = Job(4)
    tp = job.group("1", "tp", [2, 3])
    job.collective(job.world, times=2)
    job.collective(tp, times=3)
    job.collective(tp, by=[2])
    dumps = {rank: as_torchcomms(dump) for rank, dump in job.dumps().items()}

    assert_hang(diagnose(write_late(tmp_path, job, dumps)), Cause.HOST_STALL, [3])


def test_groups_without_members_prove_nothing(tmp_path: Path) -> None:
    """The list of torch 2.2 has no members: that ranks 0 and 1 are stuck is seen, on whom they wait is not."""
    job = Job(3)
    job.collective(job.world, times=3)
    job.collective(job.world, by=[0, 1])
    dumps = {rank: as_version(dump, UNVERSIONED) for rank, dump in job.dumps().items()}

    diagnosis = diagnose(write_late(tmp_path, job, dumps))

    assert (diagnosis.verdict, diagnosis.suspect_ranks) == ("inconclusive", [])


def test_one_unknown_version_among_others(tmp_path: Path) -> None:
    """A dump of version 3.0 is refused and named; that its rank is unknown costs nobody the verdict."""
    job = Job(4)
    job.collective(job.world, times=3)
    job.collective(job.world, by=job.world.without(2))
    dumps = job.dumps()
    dumps[0]["version"] = "3.0"

    diagnosis = diagnose(write_late(tmp_path, job, dumps))

    assert_hang(diagnosis, Cause.HOST_STALL, [2], group=job.world, seq_id=4)
    assert [(Path(entry.file).name, entry.result) for entry in diagnosis.unreadable_files] == [("_dump_0", "rejected")]


def test_newer_minor_version_is_read_with_a_warning(tmp_path: Path) -> None:
    """2.99 is read as what we know, and the diagnosis says that it was newer."""
    job = Job(4)
    job.collective(job.world, times=3)
    job.collective(job.world, by=job.world.without(2))
    dumps = {rank: dump | {"version": "2.99"} for rank, dump in job.dumps().items()}

    diagnosis = diagnose(write_late(tmp_path, job, dumps))

    assert_hang(diagnosis, Cause.HOST_STALL, [2], group=job.world, seq_id=4)
    assert any("2.99" in warning for warning in diagnosis.warnings)


def test_call_older_than_the_ring(tmp_path: Path) -> None:
    """The counters read 12 issued, 10 done, but the ring begins with call 12: the ranks are stuck in 11."""
    job = Job(4, before=9)
    job.collective(job.world)
    job.collective(job.world, by=job.world.without(3), times=2)
    dumps = job.dumps()
    for dump in dumps.values():
        dump["entries"] = dump["entries"][2:]

    assert_hang(diagnose(write_late(tmp_path, job, dumps)), Cause.HOST_STALL, [3], group=job.world, seq_id=11)


def test_ring_overwritten_by_running_ahead(tmp_path: Path) -> None:
    """Rank 3 stopped after call 5; the others issued 200 more calls of two groups, and their rings hold 20.

    Which of the two groups they are stuck in first is forgotten. That rank 3 issued neither is not.
    """
    job = Job(4)
    ep = job.group("1", "ep", range(4))
    for group in (job.world, ep):
        job.collective(group, times=5)
    for _ in range(100):
        job.collective(job.world, by=[0, 1, 2])
        job.collective(ep, by=[0, 1, 2])
    dumps = job.dumps()
    for dump in dumps.values():
        dump["entries"] = dump["entries"][-20:]

    diagnosis = diagnose(write_late(tmp_path, job, dumps))

    assert_hang(diagnosis, Cause.HOST_STALL, [3], seq_id=6)
    assert diagnosis.warnings


def test_unknown_order_claims_no_communication_fault(tmp_path: Path) -> None:
    """Two groups are stuck in calls that the rings forgot, and all ranks issued all of them: nobody can be named."""
    job = Job(4)
    ep = job.group("1", "ep", range(4))
    for group in (job.world, ep):
        job.collective(group, times=5)
    for _ in range(20):
        job.collective(job.world, done=False)
        job.collective(ep, done=False)
    dumps = job.dumps()
    for dump in dumps.values():
        dump["entries"] = dump["entries"][-10:]

    diagnosis = diagnose(write_late(tmp_path, job, dumps))

    assert diagnosis.cause != Cause.COMMUNICATION_FAULT
    assert diagnosis.warnings


def test_only_active_dumps(tmp_path: Path) -> None:
    """TORCH_INCLUDE_ONLY_ACTIVE drops what completed: the guilty rank's dump is empty, which is the evidence."""
    job = Job(4)
    job.collective(job.world, times=8)
    job.collective(job.world, by=job.world.without(1))
    dumps = job.dumps()
    for dump in dumps.values():
        dump["entries"] = [entry for entry in dump["entries"] if entry["state"] != "completed"]

    diagnosis = diagnose(write_late(tmp_path, job, dumps))

    assert dumps[1]["entries"] == []
    assert_hang(diagnosis, Cause.HOST_STALL, [1], group=job.world, seq_id=9)


@pytest.mark.parametrize("closing_entry", [True, False])
def test_batches_never_complete_and_are_healthy(tmp_path: Path, closing_entry: bool) -> None:
    """The sends and recvs of a batch stay scheduled for ever; the closing entry, or else the counter, says done."""
    job = Job(2)
    pipeline = job.group("1", "pp", [0, 1])
    for _ in range(3):
        job.batch(pipeline, 0, ("send", 1), ("recv", 1), closing_entry=closing_entry)
        job.batch(pipeline, 1, ("recv", 0), ("send", 0), closing_entry=closing_entry)
        job.collective(job.world)

    assert_healthy(diagnose(job.write(tmp_path)))


def test_batch_that_hangs(tmp_path: Path) -> None:
    """Rank 1 never issued its half of the third batch, so rank 0's closing entry stays open."""
    job = Job(2)
    pipeline = job.group("1", "pp", [0, 1])
    for _ in range(2):
        job.batch(pipeline, 0, ("send", 1), ("recv", 1))
        job.batch(pipeline, 1, ("recv", 0), ("send", 0))
    job.batch(pipeline, 0, ("send", 1), ("recv", 1))

    assert_hang(diagnose(job.write(tmp_path)), Cause.HOST_STALL, [1], group=pipeline, seq_id=3)


def test_gloo_calls_end_as_retired(tmp_path: Path) -> None:
    """A gloo dump never says completed: a retired call is done, and nobody is stuck."""
    job = Job(4, backend="gloo")
    job.collective(job.world, times=5)

    assert_healthy(diagnose(job.write(tmp_path)))


def test_gloo_call_that_is_not_retired(tmp_path: Path) -> None:
    """The gloo call that three ranks are in and rank 2 never issued is open because it is not retired."""
    job = Job(4, backend="gloo")
    job.collective(job.world, times=5)
    job.collective(job.world, by=job.world.without(2))

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.HOST_STALL, [2], group=job.world, seq_id=6)


def test_unknown_sizes_are_no_mismatch(tmp_path: Path) -> None:
    """2^64 - 1 stands for a size that the recorder did not know; it differs from no other size."""
    job = Job(4)
    job.collective(job.world, times=3)
    job.collective(job.world, by=[1], sizes=[[2**64 - 1]], done=False)
    job.collective(job.world, by=job.world.without(1), done=False)

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.COMMUNICATION_FAULT, [0, 1, 2, 3], group=job.world, seq_id=4)
    assert diagnosis.mismatches == ()


def test_collective_number_says_nothing_of_a_recv(tmp_path: Path) -> None:
    """In a group of both kinds last completed is 7, a collective; recv 3 is below it, and open all the same.

    Rank 1, which should send, has issued nothing since the collective.
    """
    job = Job(2)
    group = job.group("1", "pp", [0, 1])
    for _ in range(2):
        job.send(group, 1, 0)
        job.recv(group, 0, 1)
    job.collective(group, times=7)
    job.recv(group, 0, 1)
    dumps = job.dumps()

    diagnosis = diagnose(write_late(tmp_path, job, dumps))

    assert dumps[0]["pg_status"]["1"]["last_completed_collective"] == 7
    assert_hang(diagnosis, Cause.HOST_STALL, [1], group=group, seq_id=3)


def test_numbers_of_both_kinds_that_coincide(tmp_path: Path) -> None:
    """In a group of both kinds the counters read 1 issued, a recv, and 1 done, the collective before it.

    The recv's own state says that it is open, and no counter says otherwise.
    """
    job = Job(2)
    job.collective(job.world)
    job.recv(job.world, 1, 0)
    dumps = job.dumps()

    diagnosis = diagnose(write_late(tmp_path, job, dumps))

    assert dumps[1]["pg_status"]["0"]["last_enqueued_collective"] == 1
    assert dumps[1]["pg_status"]["0"]["last_completed_collective"] == 1
    assert_hang(diagnosis, Cause.HOST_STALL, [0], group=job.world)


def test_send_that_a_later_one_to_another_peer_overtook(tmp_path: Path) -> None:
    """Rank 0's send 2, to rank 2, is done, so its counters read 2/2; its send 1, to rank 1, is open all the same.

    Sends to different peers run on streams of their own: the later may complete first.
    """
    job = Job(3)
    pipeline = job.group("1", "pp", [0, 1, 2])
    job.collective(job.world)
    job.send(pipeline, 0, 1)
    job.send(pipeline, 0, 2)
    job.recv(pipeline, 2, 0)

    assert_hang(diagnose(job.write(tmp_path)), Cause.HOST_STALL, [1], group=pipeline, seq_id=1)


def test_p2p_counters_of_two_ranks_do_not_compare(tmp_path: Path) -> None:
    """In a pipeline the middle rank does twice as many sends and recvs as its neighbours: all is well."""
    job = Job(3)
    pipeline = job.group("1", "pp", [0, 1, 2])
    for _ in range(4):
        for source, destination in ((0, 1), (1, 2)):
            job.send(pipeline, source, destination)
            job.recv(pipeline, destination, source)

    assert_healthy(diagnose(job.write(tmp_path)))


def test_local_id_is_another_group_on_another_rank(tmp_path: Path) -> None:
    """Local id 1 is group 1 on ranks 0 and 1, group 2 on ranks 2 and 3; only in group 2 does somebody wait."""
    job = Job(4)
    busy, hung = job.group("1", "tp", [0, 1]), job.group("2", "ep", range(4))
    job.collective(job.world, times=2)
    job.collective(busy, times=40)
    job.collective(hung, times=3)
    job.collective(hung, by=[0, 1, 3])
    dumps = job.dumps()

    diagnosis = diagnose(write_late(tmp_path, job, dumps))

    assert [entry["pg_id"] for entry in (dumps[0]["entries"][2], dumps[3]["entries"][2])] == [1, 1]
    assert_hang(diagnosis, Cause.HOST_STALL, [2], group=hung, seq_id=4)


def test_one_name_for_two_groups_of_different_ranks(tmp_path: Path) -> None:
    """Two halves of the world both call their group `tp`; a name with other members is another group."""
    job = Job(4)
    left, right = job.group("tp", "tp", [0, 1]), job.group("tp", "tp", [2, 3])
    job.collective(job.world, times=2)
    job.collective(left, times=9)
    job.collective(right, times=3)
    job.collective(right, by=[3])

    assert_hang(diagnose(job.write(tmp_path)), Cause.HOST_STALL, [2], group=right, seq_id=4)


def test_one_key_for_two_groups_of_one_rank(tmp_path: Path) -> None:
    """`split_group` gave two groups of each rank one key, so `pg_config` shows the second alone.

    The first is done at 5, the second at 2. Read as one group the counters would contradict the entries; the only
    one who makes others wait is rank 3, which never issued the last call of the world.
    """
    job = Job(4)
    rows = [job.group("0:split", "rows", [0, 1]), job.group("0:split", "rows", [2, 3])]
    columns = [job.group("0:split", "columns", [0, 2]), job.group("0:split", "columns", [1, 3])]
    job.collective(job.world)
    for group in rows:
        job.collective(group, times=5)
    for group in columns:
        job.collective(group, times=2)
    job.collective(job.world, by=[0, 1, 2])

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.HOST_STALL, [3], group=job.world, seq_id=2)


def test_files_of_another_kind_beside_the_dumps(tmp_path: Path) -> None:
    """A text file under a dump's name is named as unreadable, and the dumps are analysed."""
    job = Job(4)
    job.collective(job.world, times=3)
    job.collective(job.world, by=job.world.without(1))
    job.write(tmp_path, ranks=[0, 1, 2])
    (tmp_path / "_dump_3").write_bytes(b"no dump")
    (tmp_path / "_dump_readme").write_bytes(encode({}))

    diagnosis = diagnose(tmp_path)

    assert_hang(diagnosis, Cause.HOST_STALL, [1], group=job.world, seq_id=4)
    assert [Path(entry.file).name for entry in diagnosis.unreadable_files] == ["_dump_3"]


def test_overtaking_send_that_an_only_active_dump_leaves_out(tmp_path: Path) -> None:
    """As before, and the dumps leave out what completed: the counters read 2/2, and of send 2 nothing else is left.

    A call of a batch is never left out, so these are single calls, and send 1 is open as it says.
    """
    job = Job(3)
    pipeline = job.group("1", "pp", [0, 1, 2])
    job.send(pipeline, 0, 1)
    job.send(pipeline, 0, 2)
    job.recv(pipeline, 2, 0)
    dumps = job.dumps()
    for dump in dumps.values():
        dump["entries"] = [entry for entry in dump["entries"] if entry["state"] != "completed"]

    assert_hang(diagnose(write_late(tmp_path, job, dumps)), Cause.HOST_STALL, [1], group=pipeline, seq_id=1)


def test_batch_before_a_collective_that_is_done(tmp_path: Path) -> None:
    """The counters count the collective, but it ran behind the batch on the same stream: the batch is done too."""
    job = Job(2)
    pipeline = job.group("1", "pp", [0, 1])
    job.batch(pipeline, 0, ("send", 1), ("recv", 1), closing_entry=False)
    job.batch(pipeline, 1, ("recv", 0), ("send", 0), closing_entry=False)
    job.collective(pipeline, times=2)

    assert_healthy(diagnose(job.write(tmp_path)))


def test_sequence_id_below_zero(tmp_path: Path) -> None:
    """A writer without counters that numbers its only call -1 costs nobody the verdict: that call is completed."""
    job = Job(2)
    job.collective(job.world)
    dumps = job.dumps()
    for dump in dumps.values():
        dump["pg_status"] = {}
        dump["entries"][0]["collective_seq_id"] = -1

    assert_healthy(diagnose(write_late(tmp_path, job, dumps)))


def test_batch_of_which_the_peer_completed_one_part(tmp_path: Path) -> None:
    """Rank 1 took what rank 0 sent, but never sent what rank 0's batch also takes: rank 0's device did not stop."""
    job = Job(2)
    pipeline = job.group("1", "pp", [0, 1])
    job.collective(job.world, times=3)
    job.batch(pipeline, 0, ("send", 1), ("recv", 1))
    job.recv(pipeline, 1, 0, done=True)

    assert_hang(diagnose(job.write(tmp_path)), Cause.HOST_STALL, [1], group=pipeline, seq_id=1)


def test_part_of_a_batch_that_is_done_waits_for_nobody(tmp_path: Path) -> None:
    """Rank 0's batch sent to rank 1, which took it, and waits for rank 2, which never sends: rank 1 delays nobody."""
    job = Job(3)
    pipeline = job.group("1", "pp", [0, 1, 2])
    job.collective(job.world, times=3)
    job.batch(pipeline, 0, ("send", 1), ("recv", 2))
    job.recv(pipeline, 1, 0, done=True)

    assert_hang(diagnose(job.write(tmp_path)), Cause.HOST_STALL, [2], group=pipeline, seq_id=1)


@pytest.mark.parametrize("operation", ["all_reduce", "send"])
def test_rank_that_went_on_in_another_group(tmp_path: Path, operation: str) -> None:
    """Rank 3 completed the call that three ranks are in, and issued one to rank 2 in another group.

    Three devices do not stop at once: rank 3 is the odd one, as if it had gone on in the same group.
    """
    job = Job(4)
    pair = job.group("1", "pp", [2, 3])
    job.collective(pair)
    job.collective(job.world, times=4)
    job.collective(job.world, done=[3])
    if operation == "send":
        job.send(pair, 3, 2)
    else:
        job.collective(pair, operation, by=[3])

    assert_hang(diagnose(job.write(tmp_path)), Cause.DESYNC, [3])


def test_counters_read_before_the_entries_of_an_only_active_dump(tmp_path: Path) -> None:
    """The counters of ranks 0 and 1 miss the end of call 3, which their entries, read later, leave out as completed.

    Rank 2 has just issued a call of another group; all is well.
    """
    job = Job(4)
    pair = job.group("1", "tp", [2, 3])
    job.collective(job.world, times=3)
    job.sleep(60)
    job.collective(pair, by=[2])
    dumps = job.dumps()
    for rank in (0, 1):
        dumps[rank]["pg_status"]["0"]["last_completed_collective"] = 2
    for dump in dumps.values():
        dump["entries"] = [entry for entry in dump["entries"] if entry["state"] != "completed"]

    diagnosis = diagnose(write(tmp_path, dumps, mtime_ns=job.now_ns))

    assert [len(dump["entries"]) for dump in dumps.values()] == [0, 0, 1, 0]
    assert_healthy(diagnosis)


def test_counters_read_after_the_entries(tmp_path: Path) -> None:
    """Rank 0 issued call 4 after its entries were read and before its counters were: it is not stuck in it."""
    job = Job(4)
    job.collective(job.world, times=3)
    dumps = job.dumps()
    dumps[0]["pg_status"]["0"]["last_enqueued_collective"] = 4

    assert_healthy(diagnose(write_late(tmp_path, job, dumps)))


def test_gloo_counter_one_too_low(tmp_path: Path) -> None:
    """Two threads of gloo counted calls 4 and 5 in the wrong order, so the counter reads 4; call 5 is retired."""
    job = Job(4, backend="gloo")
    job.collective(job.world, times=5)
    dumps = job.dumps()
    for dump in dumps.values():
        dump["pg_status"]["0"]["last_completed_collective"] = 4

    assert_healthy(diagnose(write_late(tmp_path, job, dumps)))


@pytest.mark.parametrize(("waited_s", "verdict"), [(1, "healthy"), (60, "hang")])
def test_age_of_a_call_that_the_ring_lost(tmp_path: Path, waited_s: int, verdict: str) -> None:
    """Hosts ran 20 calls ahead of their devices and the rings hold 5: a host that has only just called is not stuck."""
    job = Job(4)
    job.collective(job.world, times=3)
    job.collective(job.world, done=False, times=19)
    job.sleep(60)
    job.collective(job.world, done=False)
    dumps = job.dumps()
    for dump in dumps.values():
        dump["entries"] = dump["entries"][-5:]

    diagnosis = diagnose(write(tmp_path, dumps, mtime_ns=job.now_ns + waited_s * SECOND))

    assert diagnosis.verdict == verdict, diagnosis.summary


def test_lost_send_claims_no_communication_fault(tmp_path: Path) -> None:
    """Rank 0's host ran ahead of a send to rank 2, which stalled, and rank 0's ring holds only the calls after it.

    Its counter shows that a send is open. So that ranks 0 and 1 are both in one call does not say that it failed.
    """
    job = Job(3)
    pipeline, pair = job.group("1", "pp", [0, 1, 2]), job.group("2", "tp", [0, 1])
    job.collective(job.world, times=2)
    job.send(pipeline, 0, 1)
    job.recv(pipeline, 1, 0)
    job.send(pipeline, 0, 2)
    job.collective(pair, times=3, done=False)
    dumps = job.dumps()
    dumps[0]["entries"] = dumps[0]["entries"][-3:]

    diagnosis = diagnose(write_late(tmp_path, job, dumps))

    assert dumps[0]["pg_status"]["1"]["last_enqueued_collective"] == 2
    assert dumps[0]["pg_status"]["1"]["last_completed_collective"] == 1
    assert diagnosis.cause != Cause.COMMUNICATION_FAULT
    assert not {0, 1}.intersection(diagnosis.suspect_ranks)


def test_batch_that_one_side_did_not_start(tmp_path: Path) -> None:
    """Timing shows rank 0's device in a batch of both that rank 1's never started; its closing entry alone tells."""
    job = Job(2, timing=True)
    pipeline = job.group("1", "pp", [0, 1])
    for _ in range(2):
        job.batch(pipeline, 0, ("send", 1), ("recv", 1))
        job.batch(pipeline, 1, ("recv", 0), ("send", 0))
    dumps = job.dumps()
    for rank, (state, started) in {0: ("started", 2), 1: ("scheduled", 1)}.items():
        closing, status = dumps[rank]["entries"][-1], dumps[rank]["pg_status"]["1"]
        closing |= {"state": state, "retired": False, "time_discovered_completed_ns": None}
        closing["time_discovered_started_ns"] = closing["time_discovered_started_ns"] if rank == 0 else None
        status |= {"last_started_collective": started, "last_completed_collective": 1}

    assert_hang(diagnose(write_late(tmp_path, job, dumps)), Cause.DEVICE_STALL, [1], group=pipeline, seq_id=2)


@pytest.mark.parametrize("operation", ["all_reduce", "send"])
def test_headline_is_the_call_that_does_not_end(tmp_path: Path, operation: str) -> None:
    """Ranks 0 and 1 are in a call that does not end; that others wait for them, and longer, is the consequence."""
    job = Job(8)
    pair = job.group("1", "pp", [0, 1])
    for _ in range(3):
        job.send(pair, 0, 1)
        job.recv(pair, 1, 0)
        job.collective(job.world)
    job.collective(job.world, by=job.world.without(0, 1))
    if operation == "send":
        job.send(pair, 0, 1, done=False)
        job.recv(pair, 1, 0, done=False)
    else:
        job.collective(pair, operation, done=False)

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.COMMUNICATION_FAULT, [0, 1], group=pair)
    assert diagnosis.hung_process_groups[0].kind == ("p2p" if operation == "send" else "collective")


def test_headline_call_of_one_group_is_the_one_that_does_not_end(tmp_path: Path) -> None:
    """Rank 2's recv from rank 1, posted first, waits for the transfer from rank 0 to rank 1, which does not end."""
    job = Job(3)
    pipeline = job.group("1", "pp", [0, 1, 2])
    for _ in range(3):
        for source, destination in ((0, 1), (1, 2)):
            job.send(pipeline, source, destination)
            job.recv(pipeline, destination, source)
        job.collective(job.world)
    job.recv(pipeline, 2, 1)
    job.send(pipeline, 0, 1, done=False)
    job.recv(pipeline, 1, 0, done=False)

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.COMMUNICATION_FAULT, [0, 1], group=pipeline)
    headline = diagnosis.hung_process_groups[0]
    assert (headline.operation, headline.seq_id) in [("nccl:send", 4), ("nccl:recv", 7)]


def test_rank_that_went_on_in_a_group_that_is_new(tmp_path: Path) -> None:
    """Rank 3 completed what all others are in, and issued the first call of a group: rank 2, a member, has not."""
    job = Job(4)
    pair = job.group("1", "tp", [2, 3])
    job.collective(job.world, times=4)
    job.collective(job.world, done=[3])
    job.collective(pair, by=[3])

    assert_hang(diagnose(job.write(tmp_path)), Cause.DESYNC, [3])


def test_batches_and_collectives_of_one_group_in_an_only_active_dump(tmp_path: Path) -> None:
    """All is done, and the closing entries were left out as completed, which shows that the batches are."""
    job = Job(2)
    for _ in range(6):
        job.batch(job.world, 0, ("send", 1), ("recv", 1))
        job.batch(job.world, 1, ("recv", 0), ("send", 0))
    job.collective(job.world, times=3)
    dumps = job.dumps()
    for dump in dumps.values():
        dump["entries"] = [entry for entry in dump["entries"] if entry["state"] != "completed"]

    assert_healthy(diagnose(write_late(tmp_path, job, dumps)))


def test_device_stall_is_doubtful_where_most_are_stuck(tmp_path: Path) -> None:
    """Ranks 1 to 3 have a call open that rank 0 completed; had rank 0 gone on alone, it would be the odd one."""
    job = Job(4)
    job.collective(job.world, times=3)
    job.collective(job.world, done=[0])

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.DEVICE_STALL, [1, 2, 3])
    assert {suspect.confidence for suspect in diagnosis.suspects} == {"low"}
