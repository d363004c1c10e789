"""An object of records: how large it is, what it keeps, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from fr_exporter.errors import MalformedDump, PartialDump, RejectedDump
from fr_exporter.model import RankDump, UnreadableFile, members_digest
from fr_exporter.parsing import record
from fr_exporter.parsing.interning import Interning
from fr_exporter.parsing.record.wire import MAX_BYTES, packed, unpacked
from fr_exporter.pipeline import Fetched, Pipeline
from tests.builders import SECOND, START_NS, Job, encode
from tests.records import MAX_RANKS, node_object, read_back, read_dump

MINUTE = 60 * SECOND


def large_job(world_size: int = 1024) -> Job:
    """Return a job whose ranks are in 13 groups, with 2,000 calls done and 20 open, as rank 0 has them."""
    job = Job(world_size)
    groups = [job.world]
    for number, (step, size) in enumerate([(1, 8), (8, 16), (128, 8), (1, 2), (2, 4), (8, 2), (16, 8), (1, 64)] * 2):
        if len(groups) < 13:
            groups.append(job.group(str(number + 1), f"GROUP_{number}", [step * place for place in range(size)]))
    for call in range(1_980):
        job.collective(groups[call % 13], by=[0], done=True)
    for call in range(20):
        job.collective(groups[call % 13], by=[0])
    return job


@pytest.fixture(scope="module")
def large() -> RankDump:
    """Return the dump of rank 0 of the large job."""
    dump = large_job().dumps(ranks=[0])[0]
    stack = [{"name": f"forward_{n}", "filename": f"/srv/model/layer_{n}.py", "line": 100 + n} for n in range(27)]
    for entry in dump["entries"]:
        entry["frames"] = stack
    return read_dump(encode(dump), 0, mtime_ns=START_NS + 700 * SECOND)


def test_a_rank_needs_at_most_4_kb(large: RankDump) -> None:
    """A record of 13 groups, 20 open calls and 200 recent ones, alone in its object and with a stack, fits in 4 KB."""
    [read] = read_back(node_object([large]))

    assert len(large.operations) == 2_000
    assert len(read.accounts or {}) == 13
    assert sum(account.by_signs.standing.open_operations for account in (read.accounts or {}).values()) == 20
    assert len(read.operations) == 200
    assert len(node_object([large])) <= 4096


def test_ranks_of_a_node_share_what_they_repeat(large: RankDump) -> None:
    """Eight ranks need less than three times what one needs: member lists, stacks and signatures stand there once."""
    node = [replace(large, rank=rank) for rank in range(8)]

    assert len(node_object(node)) < 3 * len(node_object([large]))


def test_equal_records_give_equal_bytes(large: RankDump) -> None:
    """What a node publishes depends on its dumps alone, not on the order in which they landed."""
    node = [replace(large, rank=rank) for rank in range(4)]

    assert node_object(node) == node_object(reversed(node))


def test_open_calls_are_kept_however_old(large: RankDump) -> None:
    """With a history of 5 calls all 20 open ones are there, and only the last 5 count as history."""
    [read] = read_back(node_object([large], recent_calls=5))

    assert [call.record_id for call in read.operations] == [call.record_id for call in large.operations[-20:]]
    assert read.operations.history == 15


def test_only_the_front_has_its_stack(large: RankDump) -> None:
    """Of the calls that are kept the one that the rank is stuck in has its frames, whole."""
    [read] = read_back(node_object([large]))

    with_frames = [call for call in read.operations if call.frames]
    assert [(call.record_id, call.frames) for call in with_frames] == [(1_980, large.operations[1_980].frames)]
    assert len(with_frames[0].frames) == 27


def test_times_are_those_of_the_store(large: RankDump) -> None:
    """The times of a node whose clock is 5 minutes behind the store's move by 5 minutes, whatever an upload takes."""
    sent_ns = START_NS + 800 * SECOND
    data = record.stamp(node_object([large]), sent_ns)

    [read] = read_back(data, mtime_ns=sent_ns + 5 * MINUTE + 3 * SECOND)
    [same] = read_back(data, mtime_ns=sent_ns + 3 * SECOND)

    assert (read.dump_time_ns, same.dump_time_ns) == (START_NS + 700 * SECOND + 5 * MINUTE, START_NS + 700 * SECOND)
    assert read.operations[-1].issued_ns == (same.operations[-1].issued_ns or 0) + 5 * MINUTE
    assert same.operations[-1].issued_ns == large.operations[-1].issued_ns


def altered(data: bytes, change: Mapping[str, Any]) -> bytes:
    """Return an object in which some fields are others."""
    return packed(msgspec.msgpack.encode({**msgspec.msgpack.decode(unpacked(data)), **change}))


def test_keys_that_are_not_known_are_passed_over(large: RankDump) -> None:
    """A later version may add to the format without a new number."""
    data = node_object([large])

    assert read_back(altered(data, {"colour": "blue"}))[0].progress == read_back(data)[0].progress


def test_another_version_is_refused(large: RankDump) -> None:
    """An object of a version that is not known is refused, and the message says which is."""
    with pytest.raises(RejectedDump, match="version 2, known is 'fr-record' 1"):
        read_back(altered(node_object([large]), {"version": 2}))


@pytest.mark.parametrize(
    ("runs", "error"),
    [
        ([0, 1, 3], MalformedDump),  # another list than the hash says
        ([0, 0, 2], MalformedDump),  # a rank twice
        ([-1, 1, 2], RejectedDump),
        ([MAX_RANKS - 1, 1, 2], RejectedDump),
        ([0, 1, 10**18], RejectedDump),  # would fill the memory
        ([0, 1], MalformedDump),
        ([], MalformedDump),
    ],
)
def test_member_lists_must_be_those_of_their_hash(runs: list[int], error: type[Exception]) -> None:
    """A member list that is not the one its hash stands for is refused before it takes memory."""
    job = Job(2)
    job.collective(job.world, by=[0])
    data = node_object([read_dump(encode(job.dumps()[0]), 0, mtime_ns=START_NS)])

    with pytest.raises(error):
        read_back(altered(data, {"members": {members_digest((0, 1)): runs}}))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", PartialDump),
        (b"nonsense", PartialDump),
        (packed(b"nonsense"), MalformedDump),
        (packed(msgspec.msgpack.encode([])), MalformedDump),
        (packed(msgspec.msgpack.encode({"format": "fr-record", "version": 1})), MalformedDump),
        (packed(bytes(MAX_BYTES + 1)), RejectedDump),
        (packed(b"\x91" * 100_000), MalformedDump),  # lists in lists
    ],
)
def test_what_is_no_object_of_records_is_refused(data: bytes, error: type[Exception]) -> None:
    """Anything else in the place of an object is refused with a reason; what unpacks to too much is not unpacked."""
    with pytest.raises(error):
        read_back(data)


PIPELINE = Pipeline(max_dump_bytes=1 << 20, max_ranks=MAX_RANKS, min_open_age_ns=0)


def test_a_misplaced_object_is_refused(large: RankDump) -> None:
    """An object that lies under another node's name, or another job's, says nothing: it is named as unreadable."""
    fetched = Fetched("s3://bucket/job/0/node", "job", 0, "node", node_object([large]), START_NS)

    records = PIPELINE.read_records(fetched)
    assert isinstance(records, list)
    assert [(each.file.rank, each.file.node) for each in records] == [(0, "node")]
    for place in ({"node": "other"}, {"training_job": "other"}, {"attempt": 1}):
        refused = PIPELINE.read_records(replace(fetched, **place))
        assert isinstance(refused, UnreadableFile)
        assert (refused.result, refused.rank, refused.file) == ("rejected", None, "s3://bucket/job/0/node")
        assert "training job 'job', attempt 0, node 'node'" in refused.error


def test_a_file_of_records_is_named_as_such(large: RankDump) -> None:
    """A file of records in the place of a dump is known by its first bytes, and the message says how to read it."""
    with pytest.raises(MalformedDump, match="holds the records of a node"):
        read_dump(node_object([large]), 0)


def test_the_same_dump_keeps_its_version(large: RankDump) -> None:
    """Publishing once more, at another time and with other ranks beside it, gives a rank's record the same version."""
    first = PIPELINE.read_records(Fetched("u", "job", 0, "node", record.stamp(node_object([large]), 5), 7))
    other = replace(large, rank=1)
    again = PIPELINE.read_records(
        Fetched("u", "job", 0, "node", record.stamp(node_object([other, large]), 5), 5 + 5 * MINUTE)
    )

    assert isinstance(first, list)
    assert isinstance(again, list)
    assert first[0].version == again[0].version


def test_member_lists_are_shared_between_objects() -> None:
    """Two objects of one job give the same group, so that its members are held once."""
    job = Job(2)
    job.collective(job.world)
    objects = [node_object([read_dump(encode(dump), rank)]) for rank, dump in job.dumps().items()]
    interning = Interning(MAX_RANKS)
    first, second = (record.decode(data, interning, source="object", mtime_ns=0).dumps[0].groups[0] for data in objects)

    assert first is second
