"""A verdict from records is the verdict from the dumps that they were made from."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fr_exporter.analysis import diagnose
from fr_exporter.dumpset import DumpSetSettings, final_set
from fr_exporter.errors import DumpError, UsageError
from fr_exporter.model import DumpFile, DumpSet, UnreadableFile
from fr_exporter.parsing.record.wire import packed, unpacked
from fr_exporter.pipeline import Fetched, Pipeline, find_dumps
from fr_exporter.report import render_json, render_text
from fr_exporter.simulate import FAULTS, Injection, Plan, Recorder, Schedule, Sizes, formats, simulate
from tests.builders import SECOND, encode
from tests.property.strategies import job_sizes, schedules
from tests.records import MAX_RANKS, node_object, read_back, read_dump, through_the_store

EPOCH_NS = 1_790_000_000_000_000_000
SETTINGS = DumpSetSettings("job", "dumps", "job", world_size=None, window_s=120.0, grace_s=60.0)

recorders = st.builds(
    Recorder, ring=st.sampled_from([40, 2000]), only_active=st.booleans(), timing=st.booleans(), frames=st.booleans()
)


def dump_set(dumps: dict[int, bytes], mtimes_ns: dict[int, int]) -> DumpSet:
    """Return the set that dump files make."""
    return final_set(
        [
            (
                DumpFile(f"_dump_{rank}", rank, None, mtimes_ns[rank], len(content)),
                read_dump(content, rank, mtime_ns=mtimes_ns[rank]),
            )
            for rank, content in dumps.items()
        ],
        SETTINGS,
    )


@given(
    sizes=job_sizes(),
    schedule=schedules,
    recorder=recorders,
    fault=st.sampled_from(sorted(FAULTS)),
    version=st.sampled_from(formats.VERSIONS),
    ranks_per_node=st.integers(1, 8),
    seed=st.integers(0, 9),
)
@settings(max_examples=150)
def test_records_say_what_the_dumps_say(
    sizes: Sizes, schedule: Schedule, recorder: Recorder, fault: str, version: str, ranks_per_node: int, seed: int
) -> None:
    """The whole diagnosis is the same: verdict, suspects, evidence, hung groups, stacks, the progress of each rank."""
    try:
        job = simulate(Plan(sizes, (Injection(fault),), schedule, recorder, seed=seed))
    except UsageError:
        return
    dumps = {rank: encode(formats.as_version(job.dump(rank, EPOCH_NS), version)) for rank in job.moments}
    read = dump_set(dumps, {rank: EPOCH_NS + moment for rank, moment in job.moments.items()})

    published = through_the_store(read, ranks_per_node)

    assert diagnose(published, generated_at_ns=0).to_dict() == diagnose(read, generated_at_ns=0).to_dict()


@pytest.mark.parametrize("folder", ["nvrx", "torch"])
def test_records_of_real_dumps_say_what_the_dumps_say(shared_dumps: Path, folder: str) -> None:
    """Of each real set that can be read the diagnosis from records is that from the dumps, node by node of 8 ranks."""
    pipeline = Pipeline(max_dump_bytes=1 << 28, max_ranks=MAX_RANKS, min_open_age_ns=15 * SECOND)
    directories = {path.parent for path in (shared_dumps / folder).rglob("*_*[0-9]") if path.is_file()}
    for directory in sorted(directories):
        files, _ = find_dumps(str(directory), "*")
        read = final_set(pipeline.read_all(files), SETTINGS)
        published = through_the_store(read, 8)
        assert diagnose(published, generated_at_ns=0).to_dict() == diagnose(read, generated_at_ns=0).to_dict()


def node_of_a_hung_job() -> bytes:
    """Return the object of a node with the four ranks of a job in which one stalls."""
    job = simulate(Plan(Sizes(tensor=2, pipeline=2), (Injection("host_stall"),), Schedule(steps=2, layers=1)))
    return node_object(
        [
            read_dump(encode(job.dump(rank, EPOCH_NS)), rank, mtime_ns=EPOCH_NS + job.moments[rank])
            for rank in job.moments
        ]
    )


WHOLE = node_of_a_hung_job()
PLAIN = msgspec.msgpack.decode(unpacked(WHOLE))


@given(cut=st.integers(0, len(WHOLE) - 1), flipped=st.integers(0, len(WHOLE) - 1), bit=st.integers(0, 7))
@settings(max_examples=300)
def test_a_damaged_object_says_nothing_else(cut: int, flipped: int, bit: int) -> None:
    """An object that is cut short is refused; so is one with another bit, unless it says what it said before."""
    with pytest.raises(DumpError):
        read_back(WHOLE[:cut])
    damaged = bytearray(WHOLE)
    damaged[flipped] ^= 1 << bit
    with contextlib.suppress(DumpError):
        assert [dump.progress for dump in read_back(bytes(damaged))] == [dump.progress for dump in read_back(WHOLE)]


# What stands in for a value: of its type or of another, small or as large as the format allows.
intruders = (
    st.integers(-(2**63), 2**64 - 1) | st.integers(-3, 300) | st.none() | st.booleans() | st.text(max_size=3)
    | st.lists(st.integers(-3, 300), max_size=3)
)  # fmt: skip


def changed(data: st.DataObject, value: Any) -> Any:
    """Return plain data of a record in which one value, drawn at any depth, is another."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 9)):
        key = data.draw(st.sampled_from(sorted(value)))
        return {**value, key: changed(data, value[key])}
    if isinstance(value, list) and value and data.draw(st.integers(0, 9)):
        place = data.draw(st.integers(0, len(value) - 1))
        return [*value[:place], changed(data, value[place]), *value[place + 1 :]]
    return data.draw(intruders)


@given(data=st.data(), changes=st.integers(1, 3))
@settings(max_examples=600)
def test_no_object_brings_the_analysis_down(data: st.DataObject, changes: int) -> None:
    """Whatever stands in an object, it is refused with a reason, or analysed like any other; nothing fails."""
    content = PLAIN
    for _ in range(changes):
        content = changed(data, content)
    pipeline = Pipeline(max_dump_bytes=1 << 28, max_ranks=MAX_RANKS, min_open_age_ns=15 * SECOND)
    fetched = Fetched("object", "job", 0, "node", packed(msgspec.msgpack.encode(content)), EPOCH_NS)
    read = pipeline.read_records(fetched)
    if isinstance(read, UnreadableFile):
        assert read.result in {"partial", "rejected", "unreadable"}
        assert "this is a bug" not in read.error
        assert "parser failed" not in read.error
        return
    diagnosis = pipeline.analyse(final_set([(each.file, each.outcome) for each in read], SETTINGS), EPOCH_NS)
    render_json(diagnosis)
    render_text(diagnosis, verbose=True)
