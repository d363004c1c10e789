"""Facts about every simulated job, whatever its sizes and its schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from fr_exporter.errors import UsageError
from fr_exporter.simulate import FAULTS, Injection, Plan, Recorder, Schedule, Sizes, simulate
from fr_exporter.simulate.engine import Outcome, Record
from fr_exporter.simulate.layout import Group, Layout
from tests.property.strategies import job_sizes, schedules

EPOCH_NS = 1_790_000_000_000_000_000
UNEVEN = "all_to_all"
HANGS = sorted(name for name, fault in FAULTS.items() if fault.hangs)


@given(sizes=job_sizes())
def test_each_rank_is_in_one_group_of_each_kind(sizes: Sizes) -> None:
    """Groups of one kind cut the ranks into parts of the size that their name says; embeddings join the ends."""
    of_kind: dict[str, list[Group]] = defaultdict(list)
    for group in Layout(sizes).groups:
        of_kind[group.desc].append(group)
    for desc, size in {
        "default_pg": sizes.world_size,
        "DATA_PARALLEL_GROUP_WITH_CP": sizes.data * sizes.context,
        "CONTEXT_PARALLEL_GROUP": sizes.context,
        "MODEL_PARALLEL_GROUP": sizes.tensor * sizes.pipeline,
        "TENSOR_MODEL_PARALLEL_GROUP": sizes.tensor,
        "PIPELINE_MODEL_PARALLEL_GROUP": sizes.pipeline,
        "EXPERT_MODEL_PARALLEL_GROUP": sizes.expert,
        "EXPERT_DATA_PARALLEL_GROUP": sizes.data * sizes.context // sizes.expert,
    }.items():
        if desc in of_kind:
            assert {len(group.ranks) for group in of_kind[desc]} == {size}
            assert sorted(rank for group in of_kind[desc] for rank in group.ranks) == list(range(sizes.world_size))
    assert ("EXPERT_MODEL_PARALLEL_GROUP" in of_kind) == (sizes.expert > 1)
    pipelines = {group.ranks for group in of_kind["PIPELINE_MODEL_PARALLEL_GROUP"]}
    ends = {(ranks[0], ranks[-1]) if len(ranks) > 1 else ranks for ranks in pipelines}
    assert {group.ranks for group in of_kind["EMBEDDING_GROUP"]} == ends


@given(sizes=job_sizes(), schedule=schedules, fault=st.sampled_from(["healthy", "slow_rank"]), seed=st.integers(0, 9))
def test_a_job_without_a_hang_runs_to_its_end(sizes: Sizes, schedule: Schedule, fault: str, seed: int) -> None:
    """Every call of every program completes, after it was issued and started; each stream runs one at a time."""
    job = simulate(Plan(sizes, (Injection(fault),), schedule, seed=seed))
    assert all(run.next_item == len(run.items) for run in job.outcome.runs)
    for run in job.outcome.runs:
        on_stream: dict[int, int] = defaultdict(int)
        for record in run.records:
            assert record.started_ns is not None
            assert record.completed_ns is not None
            assert record.issued_ns <= record.started_ns < record.completed_ns
            assert on_stream[id(record.stream)] <= record.started_ns
            on_stream[id(record.stream)] = record.completed_ns


@given(sizes=job_sizes(), schedule=schedules)
def test_members_of_a_group_issue_one_sequence(sizes: Sizes, schedule: Schedule) -> None:
    """At each sequence ID all members of a group bring the same operation and sizes; each send has its recv."""
    outcome = simulate(Plan(sizes, (Injection("healthy"),), schedule)).outcome
    for group, sequences in _collectives(outcome).items():
        assert sorted(sequences) == sorted(group.ranks)
        assert len({tuple(map(_brought, sequence)) for sequence in sequences.values()}) == 1
        for sequence in sequences.values():
            assert [record.collective_seq_id for record in sequence] == list(range(1, len(sequence) + 1))
    transfers = _transfers(outcome)
    assert transfers["send"] == transfers["recv"]


def _collectives(outcome: Outcome) -> dict[Group, dict[int, list[Record]]]:
    """Return the collectives of each group by rank, in issue order."""
    found: dict[Group, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for run in outcome.runs:
        for record in run.records:
            if not record.call.transfers:
                found[record.call.group][run.rank].append(record)
    return found


def _brought(record: Record) -> tuple[object, ...]:
    call = record.call
    return call.operation, call.dtype, call.root, () if call.operation == UNEVEN else call.inputs


def _transfers(outcome: Outcome) -> dict[str, dict[tuple[Group, tuple[int, int]], int]]:
    """Count the sends and the recvs of each pair of ranks, the sender first."""
    found: dict[str, dict[tuple[Group, tuple[int, int]], int]] = {"send": defaultdict(int), "recv": defaultdict(int)}
    for run in outcome.runs:
        for record in run.records:
            for verb, peer in record.call.transfers:
                ends = (run.rank, record.call.group.ranks[peer])
                found[verb][record.call.group, ends if verb == "send" else ends[::-1]] += 1
    return found


@settings(max_examples=40)
@given(
    sizes=job_sizes(),
    schedule=schedules,
    faults=st.lists(st.sampled_from(HANGS), min_size=1, max_size=2, unique=True),
    timing=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_hang_is_told_truly(sizes: Sizes, schedule: Schedule, faults: Sequence[str], timing: bool, seed: int) -> None:
    """Calls complete only where all that they need came; the truth names ranks of the job and open calls of theirs."""
    plan = Plan(
        sizes,
        tuple(map(Injection, faults)),
        schedule,
        Recorder(timing=timing, frames=False),
        ranks_per_node=2,
        seed=seed,
    )
    try:
        job = simulate(plan)
    except UsageError:
        return  # No rank of this job issues such a call, or none of its ranks would be left.
    assert job.outcome.hangs
    assert job.truth.verdict == "hang"
    assert set(job.truth.required) <= set(job.truth.allowed) <= set(range(sizes.world_size))
    assert job.truth.causes
    assert job.truth.hung
    _assert_completed_together(job.outcome, may_end_alone="ahead" in faults)
    dumps = [job.dump(rank, EPOCH_NS) for rank in job.moments]
    assert len(dumps) == sum(run.leaves_dump for run in job.outcome.runs)


def _assert_completed_together(outcome: Outcome, *, may_end_alone: bool) -> None:
    """Check that a collective without a root that ended on one rank was started by all, and ended on all of them."""
    calls: dict[tuple[Group, int], list[Record]] = defaultdict(list)
    for sequences in _collectives(outcome).values():
        for sequence in sequences.values():
            for record in sequence:
                calls[record.call.group, record.collective_seq_id].append(record)
    for (group, _), records in calls.items():
        ended = [record for record in records if record.completed_ns is not None]
        if ended and all(record.call.root is None for record in records):
            assert len(records) == len(group.ranks)
            assert all(record.started_ns is not None for record in records)
            assert may_end_alone or len(ended) == len(records)
