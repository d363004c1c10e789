"""The simulator: jobs like real ones, faults that do what they say, dumps that show what a recorder would."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from fr_exporter.errors import UsageError
from fr_exporter.model import RankDump
from fr_exporter.parsing import DumpReader
from fr_exporter.simulate import FAULTS, Injection, Job, Plan, Recorder, Schedule, Sizes, formats, simulate
from fr_exporter.simulate.engine import Record
from fr_exporter.simulate.layout import Layout
from fr_exporter.simulate.program import Call

SECOND = 1_000_000_000
EPOCH_NS = 1_790_000_000 * SECOND
MIXED = Sizes(tensor=2, pipeline=2, data=4)
HANGS = sorted(name for name, fault in FAULTS.items() if fault.hangs)

Dump = dict[str, Any]


def run(fault: str, sizes: Sizes = MIXED, *, ranks: tuple[int, ...] | None = None, **options: Any) -> Job:
    """Simulate a job with one fault."""
    return simulate(Plan(sizes, (Injection(fault, ranks),), ranks_per_node=4, **options))


def seen_at(job: Job, rank: int, moment_ns: int) -> Dump:
    """Return what a rank would have dumped at a moment of its choice."""
    return replace(job, moments={rank: moment_ns}).dump(rank, EPOCH_NS)


def end_of(job: Job) -> int:
    """Return a moment after everything that happened was noted."""
    records = [record for run in job.outcome.runs for record in run.records]
    return max(record.completed_ns or record.issued_ns for record in records) + SECOND


def load(content: bytes) -> RankDump:
    """Read a dump as the exporter does."""
    return DumpReader(1 << 30).read(BytesIO(content), size=len(content), rank=0, node=None, source="", mtime_ns=None)


def decode(path: Path) -> Any:
    """Return what a file holds, as plain data."""
    with path.open("rb") as file:
        return DumpReader(1 << 30).decode(file, size=path.stat().st_size)


def fronts_of(job: Job) -> dict[int, Record]:
    """Return the oldest call that never completed of each rank that has one."""
    return {run.rank: front for run in job.outcome.runs if (front := run.front) is not None}


def waited_for(job: Job, rank: int) -> set[int]:
    """Return the others that have not come to the call a rank is stuck in; where all came, all of them."""
    meetings = job.outcome.unfinished(fronts_of(job)[rank])
    return {other for meeting in meetings for other in (meeting.lacks or meeting.ranks)} - {rank}


# Groups.

TWO_EACH = {
    "default_pg": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "DATA_PARALLEL_GROUP_WITH_CP": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "CONTEXT_PARALLEL_GROUP": [[0], [1], [2], [3], [4], [5], [6], [7]],
    "MODEL_PARALLEL_GROUP": [[0, 1, 4, 5], [2, 3, 6, 7]],
    "TENSOR_MODEL_PARALLEL_GROUP": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "PIPELINE_MODEL_PARALLEL_GROUP": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "EMBEDDING_GROUP": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "EXPERT_MODEL_PARALLEL_GROUP": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "EXPERT_DATA_PARALLEL_GROUP": [[0], [1], [2], [3], [4], [5], [6], [7]],
}


def test_groups_are_cut_as_megatron_cuts_them() -> None:
    """With two ranks along tensor, data, pipeline and expert, the groups are those that stand here, in this order."""
    groups = Layout(Sizes(tensor=2, pipeline=2, data=2, expert=2)).groups
    assert [(group.desc, list(group.ranks)) for group in groups] == [
        (desc, ranks) for desc, members in TWO_EACH.items() for ranks in members
    ]
    assert [group.name for group in groups] == [str(number) for number in range(len(groups))]


def test_groups_are_those_of_a_real_job(shared_dumps: Path) -> None:
    """The real 16-rank job (tensor 2, data 2, pipeline 4) has the groups that are made for its sizes."""
    layout = Layout(Sizes(tensor=2, pipeline=4, data=2))
    for rank, made in enumerate(layout.groups_of):
        found = decode(shared_dumps / "nvrx" / "gpu_error_1st" / f"_dump_{rank}")["pg_config"].values()
        real = {group["desc"]: group["ranks"] for group in found}
        shared = set(real).intersection(made)
        assert len(shared) >= 5
        assert {desc: real[desc] for desc in shared} == {desc: made[desc].ranks_text for desc in shared}


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 0},
        {"tensor": 1},
        {"data": 4, "expert": 3},
        {"tensor": 8, "pipeline": 16, "data": 129},
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    """Sizes below 1, experts that do not divide, one rank or more than 16,384 are a usage error."""
    with pytest.raises(UsageError):
        Sizes(**sizes)


@pytest.mark.parametrize(
    ("injection", "said"),
    [
        (Injection("gremlins"), "unknown fault"),
        (Injection("host_stall", (16,)), "no rank 16"),
        (Injection("missing_send", (0,)), "cannot befall rank 0"),
        (Injection("killed", tuple(range(16))), "leaves no rank"),
    ],
)
def test_impossible_faults_are_refused(injection: Injection, said: str) -> None:
    """A fault that does not exist, fits no call of its rank, or leaves nobody to dump, is a usage error."""
    with pytest.raises(UsageError, match=said):
        simulate(Plan(Sizes(data=16), (injection,)))


def test_a_job_of_one_step_is_refused() -> None:
    """A fault strikes before the last step, so there are two at least."""
    with pytest.raises(UsageError, match="steps"):
        Schedule(steps=1)


# The form of a dump.


def form_of(value: Any) -> str:
    """Name the type of a value, with those of what is in it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {form_of(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}[{' | '.join(sorted({form_of(each) for each in value}))}]"
    return type(value).__name__


def forms_of(entries: list[Dump]) -> dict[str, set[str]]:
    """Return the forms that the values of each key have."""
    forms: dict[str, set[str]] = {}
    for entry in entries:
        for key, value in entry.items():
            forms.setdefault(key, set()).add(form_of(value))
    return forms


@pytest.mark.parametrize("real", ["08_healthy/nccl", "07_killed_rank/nccl", "08_healthy/gloo"])
def test_dumps_have_the_form_of_torchs(shared_dumps: Path, real: str) -> None:
    """The keys of a dump and of its entries, and their order, are those of a real one; so are the types of values."""
    other = decode(shared_dumps / "torch" / real / "nccl_trace_rank_0")
    dump = run("healthy").dump(0, EPOCH_NS)
    assert list(dump) == list(other)
    assert {tuple(entry) for entry in dump["entries"]} == {tuple(entry) for entry in other["entries"]}
    for key in ("pg_config", "pg_status"):
        assert {form_of(value) for value in dump[key].values()} == {form_of(value) for value in other[key].values()}
    if real.endswith("nccl"):
        assert forms_of(dump["entries"]) == forms_of(other["entries"])


def test_dumps_have_the_form_of_a_real_megatron_job(shared_dumps: Path) -> None:
    """Spelled as version 2.9 and without frames, keys and types are those of the 16-rank job's dumps.

    As there, groups are listed by their names as text, counters by local id, and numbered in the order of both.
    """
    other = decode(shared_dumps / "nvrx" / "gpu_error_1st" / "_dump_0")
    job = run("host_stall", Sizes(tensor=2, pipeline=4, data=2), recorder=Recorder(frames=False))
    dump = formats.as_version(job.dump(0, EPOCH_NS), "2.9")
    assert set(dump) == set(other)
    real, made = forms_of(other["entries"]), forms_of(dump["entries"])
    assert set(made) == set(real)
    assert {key: made[key] for key in real if key not in _VARIED} == {
        key: real[key] for key in real if key not in _VARIED
    }
    for each in (dump, other):
        assert list(each["pg_config"]) == sorted(each["pg_config"])
        assert list(each["pg_status"]) == sorted(each["pg_status"], key=int)
        assert [name for name in each["pg_config"] if not each["pg_config"][name]["ranks"].startswith("[0")] == []


# That job recorded the active calls alone, none of them a batch.
_VARIED = frozenset({"input_sizes", "output_sizes", "input_dtypes", "output_dtypes", "time_discovered_completed_ns"})


def test_a_batch_has_one_closing_entry_which_alone_completes() -> None:
    """A batch of send and recv shares one p2p sequence ID, counts each as an operation, and closes with no tensors."""
    entries = seen_at(job := run("healthy"), 0, end_of(job))["entries"]
    first = next(index for index, entry in enumerate(entries) if len(_batch_at(entries, index)) == 3)
    sent, received, closing = batch = _batch_at(entries, first)
    assert [entry["profiling_name"] for entry in batch] == ["nccl:send 0->1", "nccl:recv 0<-1", "nccl:coalesced"]
    assert [entry["record_id"] - sent["record_id"] for entry in batch] == [0, 1, 2]
    assert [entry["is_p2p"] for entry in batch] == [True, True, False]
    assert [entry["state"] for entry in batch] == ["scheduled", "scheduled", "completed"]
    assert [entry["retired"] for entry in batch] == [False, False, True]
    assert {entry["p2p_seq_id"] for entry in batch} == {sent["p2p_seq_id"]}
    assert received["op_id"] == closing["op_id"] == sent["op_id"] + 1
    assert closing["input_sizes"] == closing["output_sizes"] == closing["input_dtypes"] == []


def _batch_at(entries: list[Dump], index: int) -> list[Dump]:
    """Return the entries from an index on that share its group and its p2p sequence ID, where it is a send or recv."""
    first = entries[index]
    alike = [
        entry
        for entry in entries[index : index + 3]
        if (entry["pg_id"], entry["p2p_seq_id"]) == (first["pg_id"], first["p2p_seq_id"])
    ]
    return alike if first["is_p2p"] else []


@pytest.mark.parametrize("version", formats.VERSIONS)
def test_every_version_and_json_load(version: str) -> None:
    """The reader finds the same calls, in the same states, in each form in which a dump may be written."""
    dump = run("host_stall").dump(0, EPOCH_NS)
    spelled = formats.as_version(dump, version)
    contents = [formats.to_pickle(spelled)]
    if isinstance(spelled, dict):
        contents.append(formats.to_json(spelled))
    calls = [(entry["profiling_name"].split()[0], entry["state"]) for entry in dump["entries"]]
    for content in contents:
        operations = load(content).operations
        assert [(operation.operation, operation.state) for operation in operations] == calls


# Determinism.

_FINGERPRINT = """
import hashlib
from fr_exporter.simulate import Injection, Plan, Sizes, formats, simulate
faults = Injection("device_lost"), Injection("skipped_call")
job = simulate(Plan(Sizes(tensor=2, pipeline=2, data=2, expert=2), faults))
content = [formats.to_json(job.dump(rank, 0)) for rank in job.moments]
print(hashlib.sha256(b"".join(content) + repr(job.truth).encode()).hexdigest())
"""


def test_equal_plans_give_equal_dumps_whatever_the_hash_seed() -> None:
    """Two processes that hash differently write the same dumps and the same truth."""
    found = {
        subprocess.run(
            [sys.executable, "-c", _FINGERPRINT],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_another_seed_gives_another_job() -> None:
    """The seed chooses the rank at fault: twenty seeds do not all choose the same."""
    assert len({run("host_stall", Sizes(data=8), seed=seed).truth.faults for seed in range(20)}) > 1


# Faults.


@pytest.mark.parametrize("fault", HANGS)
@pytest.mark.parametrize("schedule", [Schedule(), Schedule(batched=False), Schedule(p2p_sync=False)])
def test_every_wait_ends_at_a_fault(fault: str, schedule: Schedule) -> None:
    """Whoever is stuck waits, over others, for a rank at fault, or in a call that cannot end and that one is in."""
    job = run(fault, schedule=schedule)
    explained = {rank for each in job.truth.faults for rank in each.ranks}
    unexplained = set(fronts_of(job)) - explained
    assert unexplained, "somebody else must be stuck"
    while newly := {rank for rank in unexplained if not explained.isdisjoint(waited_for(job, rank))}:
        explained |= newly
        unexplained -= newly
    assert not unexplained


@pytest.mark.parametrize("fault", HANGS)
def test_hung_calls_are_open_in_dumps(fault: str) -> None:
    """Each call that the truth names as hung is issued and not completed in the dump of one of its members."""
    job = run(fault)
    assert job.truth.verdict == "hang"
    assert job.truth.hung
    for hung in job.truth.hung:
        seq_id = "p2p_seq_id" if hung.kind == "p2p" else "collective_seq_id"
        assert any(
            entry["process_group"][0] == hung.process_group
            and entry[seq_id] == hung.seq_id
            and entry["profiling_name"] == f"nccl:{hung.operation}"
            and entry["state"] != "completed"
            for rank in set(hung.ranks).intersection(job.moments)
            for entry in job.dump(rank, EPOCH_NS)["entries"]
        )


def test_a_stalled_host_issues_nothing_more() -> None:
    """It issued fewer calls than its program has, and its last is older than the stuck call of whoever waits for it."""
    job = run("host_stall", ranks=(5,))
    stalled = job.outcome.runs[5]
    assert len(stalled.records) < sum(isinstance(item, Call) for item in stalled.items)
    waiting = [front for rank, front in fronts_of(job).items() if 5 in waited_for(job, rank)]
    assert waiting
    assert all(front.issued_ns > stalled.records[-1].issued_ns for front in waiting)


def test_a_dead_process_leaves_no_dump() -> None:
    """A killed rank is not among those that dump; of a lost node none is."""
    assert set(run("killed", ranks=(6,)).moments) == set(range(16)) - {6}
    assert set(run("node_lost", ranks=(6,)).moments) == set(range(16)) - {4, 5, 6, 7}


def test_a_process_that_waits_is_killed_all_the_same() -> None:
    """Those that others hold up before they come to where they die leave no dump either."""
    job = simulate(Plan(Sizes(tensor=2, pipeline=8), (Injection("killed", (1, 5, 7)),), seed=11))
    assert set(job.moments) == set(range(16)) - {1, 5, 7}


def test_peers_completed_what_a_lost_device_shows_open() -> None:
    """A call that the lost device's rank shows open is completed on another member; it sees no completion any more."""
    job = next(job for seed in range(20) if (job := run("device_lost", seed=seed)).truth.decidable)
    (lost,) = job.truth.required
    completed = {
        (entry["process_group"], entry["collective_seq_id"], entry["p2p_seq_id"])
        for rank in job.moments
        if rank != lost
        for entry in job.dump(rank, EPOCH_NS)["entries"]
        if entry["state"] == "completed"
    }
    dump = job.dump(lost, EPOCH_NS)
    opened = [entry for entry in dump["entries"] if entry["state"] == "scheduled" and not entry["is_p2p"]]
    assert any(
        (entry["process_group"], entry["collective_seq_id"], entry["p2p_seq_id"]) in completed for entry in opened
    )
    lost_ns = EPOCH_NS + job.outcome.runs[lost].lost_ns
    assert all((entry["time_discovered_completed_ns"] or 0) <= lost_ns for entry in dump["entries"])


@pytest.mark.parametrize(
    ("fault", "key"),
    [("mismatch_operation", "profiling_name"), ("mismatch_size", "input_sizes"), ("mismatch_dtype", "input_dtypes")],
)
def test_a_mismatch_differs_in_what_its_name_says(fault: str, key: str) -> None:
    """In the call that the rank at fault is stuck in, it brings something else, and all others the same."""
    job = run(fault, Sizes(tensor=4, data=4))
    ((odd,),) = [fault.ranks for fault in job.truth.faults]
    front = job.outcome.runs[odd].front
    assert front is not None
    brought = {
        rank: str(entry[key])
        for rank in front.call.group.ranks
        for entry in job.dump(rank, EPOCH_NS)["entries"]
        if entry["process_group"][0] == front.call.group.name
        if entry["collective_seq_id"] == front.collective_seq_id
    }
    assert set(brought) == set(front.call.group.ranks)
    assert Counter(brought.values())[brought[odd]] == 1
    assert len(set(brought.values())) == 2


def test_a_link_fault_holds_all_of_a_call() -> None:
    """All members have issued the call, and none completed it."""
    job = run("link_fault", Sizes(tensor=4, data=4))
    assert job.truth.required
    hung = next(hung for hung in job.truth.hung if set(job.truth.required) == set(hung.ranks))
    for rank in hung.ranks:
        front = job.outcome.runs[rank].front
        assert front is not None
        assert (front.call.group.name, front.collective_seq_id) == (hung.process_group, hung.seq_id)


def test_the_rank_ahead_completed_what_the_others_are_in() -> None:
    """It alone completed the reduction over the whole job, and went on."""
    job = run("ahead", ranks=(3,))
    ahead = job.outcome.runs[3]
    stuck = {run.front.collective_seq_id for run in job.outcome.runs if run.rank != 3 and run.front is not None}
    assert len(stuck) == 1
    (same,) = [
        record for record in ahead.records if record.call.group.name == "0" and record.collective_seq_id in stuck
    ]
    assert same.completed_ns is not None
    assert ahead.records[-1] is not same


@pytest.mark.parametrize(("fault", "verb"), [("missing_send", "send"), ("missing_recv", "recv")])
def test_a_missing_transfer_leaves_its_counterpart_alone(fault: str, verb: str) -> None:
    """Between the rank at fault and one peer, there is one send or recv fewer than its counterparts need."""
    job = run(fault, Sizes(pipeline=4, data=2), schedule=Schedule(p2p_sync=False))
    ((faulty,),) = [fault.ranks for fault in job.truth.faults]
    healthy = run("healthy", Sizes(pipeline=4, data=2), schedule=Schedule(p2p_sync=False))
    program = [_transfers(run.items) for run in (job.outcome.runs[faulty], healthy.outcome.runs[faulty])]
    gone = program[1] - program[0]
    assert sum(gone.values()) == 1
    assert {each for each, _ in gone} == {verb}


def _transfers(items: Any) -> Counter[tuple[str, int]]:
    return Counter(transfer for item in items for transfer in getattr(item, "transfers", ()))


@pytest.mark.parametrize("fault", ["slow_rank", "healthy"])
def test_nothing_hangs_without_a_fault(fault: str) -> None:
    """Every call completes, and the truth names nobody."""
    job = run(fault)
    assert not job.outcome.hangs
    assert (job.truth.verdict, job.truth.allowed, job.truth.hung) == ("healthy", (), ())


# What the recorder holds.


def test_the_ring_keeps_the_newest_entries() -> None:
    """A small ring holds the end of what a large one holds, with the same numbers, and counters do not shrink."""
    whole, short = (run("host_stall", recorder=Recorder(ring=ring)).dump(0, EPOCH_NS) for ring in (2000, 7))
    assert len(whole["entries"]) > 7
    assert short == whole | {"entries": whole["entries"][-7:]}
    assert [entry["record_id"] for entry in whole["entries"]] == list(range(len(whole["entries"])))


def test_only_active_leaves_completed_calls_out() -> None:
    """What is left are the entries that are not completed, as they are in the full dump."""
    whole, active = (run("host_stall", recorder=Recorder(only_active=only)).dump(0, EPOCH_NS) for only in (False, True))
    assert active["entries"] == [entry for entry in whole["entries"] if entry["state"] != "completed"]
    assert active["pg_status"] == whole["pg_status"]


def test_without_timing_nothing_is_seen_to_start() -> None:
    """No call is `started`, none has a start or a duration, and last started is -1 for every group."""
    dump = run("link_fault").dump(0, EPOCH_NS)
    assert all(entry["time_discovered_started_ns"] is None and "duration_ms" not in entry for entry in dump["entries"])
    assert all(entry["state"] != "started" for entry in dump["entries"])
    assert {status["last_started_collective"] for status in dump["pg_status"].values()} == {-1}


def test_with_timing_starts_and_durations_are_seen() -> None:
    """The call of a broken link reads `started` on all its members; calls that the watchdog retired have a duration."""
    job = run("link_fault", Sizes(tensor=4, data=2), recorder=Recorder(timing=True))
    for rank in job.truth.required:
        dump = job.dump(rank, EPOCH_NS)
        front = job.outcome.runs[rank].front
        assert front is not None
        (entry,) = [
            entry
            for entry in dump["entries"]
            if entry["process_group"][0] == front.call.group.name
            if entry["collective_seq_id"] == front.collective_seq_id
        ]
        assert (entry["state"], entry["time_discovered_completed_ns"]) == ("started", None)
        assert all(("duration_ms" in entry) == entry["retired"] for entry in dump["entries"])
        assert dump["pg_status"][str(entry["pg_id"])]["last_started_collective"] == front.collective_seq_id


def test_frames_tell_where_calls_were_issued() -> None:
    """With frames each entry has its stack, innermost first; without, the key is not there."""
    with_frames, without = (run("healthy", recorder=Recorder(frames=on)).dump(0, EPOCH_NS) for on in (True, False))
    assert all(entry["frames"][-1]["name"] == "train" for entry in with_frames["entries"])
    assert all("frames" not in entry for entry in without["entries"])


def test_a_dump_shows_nothing_later_than_its_moment() -> None:
    """At each moment every time in a dump lies before it, and it holds the first of the calls of a later dump."""
    job = run("healthy", recorder=Recorder(timing=True))
    end_ns = end_of(job)
    ids = [entry["record_id"] for entry in seen_at(job, 3, end_ns)["entries"]]
    for moment_ns in range(0, end_ns, end_ns // 9):
        dump = seen_at(job, 3, moment_ns)
        times = [value for entry in dump["entries"] for key, value in entry.items() if key.endswith("_ns")]
        assert all(time is None or time <= EPOCH_NS + moment_ns for time in times)
        assert [entry["record_id"] for entry in dump["entries"]] == ids[: len(dump["entries"])]


def test_the_counters_are_those_of_what_the_watchdog_noted() -> None:
    """Where a group has collectives alone, last completed is the newest retired call, at any moment."""
    job = run("healthy", Sizes(tensor=2, data=4))
    end_ns = end_of(job)
    for moment_ns in range(end_ns // 7, end_ns, end_ns // 7):
        dump = seen_at(job, 0, moment_ns)
        for local_id, status in dump["pg_status"].items():
            entries = [entry for entry in dump["entries"] if str(entry["pg_id"]) == local_id]
            retired = [entry["collective_seq_id"] for entry in entries if entry["retired"]]
            assert status["last_completed_collective"] == max(retired, default=-1)
            assert status["last_enqueued_collective"] == entries[-1]["collective_seq_id"]


def test_a_hang_is_dumped_after_the_timeout_of_its_oldest_call() -> None:
    """Ranks dump once the oldest stuck call has been open for the timeout that its entry names, and seconds apart."""
    job = run("host_stall")
    oldest_ns = min(front.issued_ns for run in job.outcome.runs if (front := run.front) is not None)
    timeout_ms = job.dump(0, EPOCH_NS)["entries"][-1]["timeout_ms"]
    waits = [moment - oldest_ns - timeout_ms * 1_000_000 for moment in job.moments.values()]
    assert 0 <= min(waits) <= max(waits) <= 5 * SECOND
