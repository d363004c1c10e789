"""Every fault of the simulator, in small jobs of every kind: the verdict is what really happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fr_exporter.diagnosis import Diagnosis
from fr_exporter.simulate import FAULTS, Injection, Job, Plan, Recorder, Schedule, Sizes, Truth, simulate
from fr_exporter.simulate.formats import as_json, as_version
from tests.builders import Dump, encode, encode_json, write
from tests.verdicts import assert_healthy, causes, diagnose

EPOCH_NS = 1_790_000_000_000_000_000
SIZES = {
    "tensor": Sizes(tensor=2, data=4),
    "pipeline": Sizes(pipeline=4, data=3),
    "expert": Sizes(tensor=2, pipeline=2, data=4, expert=4),
}
TRANSFERS = {"missing_send", "missing_recv"}
HANGS = [name for name, fault in FAULTS.items() if fault.hangs]
RUNNING = [name for name, fault in FAULTS.items() if not fault.hangs]

over_sizes = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def run(sizes: Sizes, *injections: Injection, seed: int = 0, recorder: Recorder | None = None) -> Job:
    """Simulate a job; the seed decides on its schedule, too, and where no recorder is given on timing."""
    return simulate(
        Plan(
            sizes,
            injections,
            Schedule(steps=3, layers=1, batched=seed % 2 == 0, p2p_sync=seed % 4 < 2),
            Recorder(timing=seed % 3 == 0, frames=False) if recorder is None else recorder,
            ranks_per_node=4,
            seed=seed,
        )
    )


def diagnose_job(directory: Path, job: Job, form: Callable[[Dump], Dump] = lambda dump: dump) -> Diagnosis:
    """Analyse what the ranks of a job dump, in a form of it."""
    dumps = {rank: form(job.dump(rank, EPOCH_NS)) for rank in job.moments}
    moments = {rank: EPOCH_NS + moment for rank, moment in job.moments.items()}
    return diagnose(write(directory, dumps, mtime_ns=moments, encoder=encode_json if form is as_json else encode))


def assert_true(diagnosis: Diagnosis, truth: Truth) -> None:
    """Assert that a hang is told as it was: who made others wait, why, and in which call."""
    named = set(diagnosis.suspect_ranks)
    assert diagnosis.verdict == truth.verdict == "hang", diagnosis.summary
    assert set(truth.required) <= named <= set(truth.allowed), (truth, diagnosis.summary)
    assert named, truth
    assert diagnosis.cause in truth.causes, (truth, diagnosis.summary)
    headline = diagnosis.hung_process_groups[0]
    hung = [(call.process_group, call.ranks, call.kind, call.seq_id) for call in truth.hung]
    assert (headline.group.name, headline.group.ranks, headline.kind, headline.seq_id) in hung, diagnosis.summary


@pytest.mark.parametrize("seed", [0, 1, 6])
@pytest.mark.parametrize("fault", HANGS)
@over_sizes
def test_fault_is_told_as_it_was(tmp_path: Path, sizes: Sizes, fault: str, seed: int) -> None:
    """The suspects are those that the dumps of such a fault show, with its cause and a call that really hung."""
    if fault in TRANSFERS and sizes.pipeline == 1:
        sizes = Sizes(pipeline=2, data=4)
    job = run(sizes, Injection(fault), seed=seed)

    assert_true(diagnose_job(tmp_path, job), job.truth)


RECORDERS = {
    "complete": Recorder(frames=False),
    "with frames": Recorder(),
    "with timing": Recorder(frames=False, timing=True),
    "ring of 50": Recorder(frames=False, ring=50),
    "ring of 20": Recorder(frames=False, ring=20),
    "only active": Recorder(frames=False, only_active=True),
}
FORMS: dict[str, Callable[[Dump], Dump]] = {
    "JSON": as_json,
    "2.9": lambda dump: as_version(dump, "2.9"),
    "2.4": lambda dump: as_version(dump, "2.4"),
    "2.1": lambda dump: as_version(dump, "2.1"),
}
over_forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@pytest.mark.parametrize("recorder", RECORDERS.values(), ids=RECORDERS)
@pytest.mark.parametrize("fault", RUNNING)
@over_sizes
def test_running_job_never_alarms(tmp_path: Path, sizes: Sizes, fault: str, recorder: Recorder) -> None:
    """Ranks that dump at different moments of a running job, one of them slow, are not stuck, whatever they record."""
    assert_healthy(diagnose_job(tmp_path, run(sizes, Injection(fault), recorder=recorder)))


@over_forms
@over_sizes
def test_running_job_never_alarms_in_other_forms(tmp_path: Path, sizes: Sizes, form: Callable[[Dump], Dump]) -> None:
    """Without frames, threads, timeouts or counters, as others and older versions write, nobody is stuck either."""
    assert_healthy(diagnose_job(tmp_path, run(sizes, Injection("healthy"), seed=1), form))


@over_forms
@pytest.mark.parametrize("fault", ["host_stall", "mismatch_operation", "killed"])
def test_fault_is_told_from_other_forms(tmp_path: Path, fault: str, form: Callable[[Dump], Dump]) -> None:
    """A fault that entries and members show is told from every form that has them."""
    job = run(SIZES["expert"], Injection(fault), seed=3)

    assert_true(diagnose_job(tmp_path, job, form), job.truth)


@pytest.mark.parametrize("recorder", ["complete", "ring of 50", "only active"])
@pytest.mark.parametrize("stalled", [(0, 3), (1, 4, 6)])
@over_sizes
def test_several_hosts_stall(tmp_path: Path, sizes: Sizes, stalled: tuple[int, ...], recorder: str) -> None:
    """Of several hosts that stopped, those that others are stuck for are named, and no other."""
    job = run(sizes, Injection("host_stall", stalled), seed=2, recorder=RECORDERS[recorder])

    assert_true(diagnose_job(tmp_path, job), job.truth)


@pytest.mark.parametrize(
    "faults", [("host_stall", "killed"), ("host_stall", "device_lost"), ("killed", "mismatch_operation")]
)
@over_sizes
def test_faults_together(tmp_path: Path, sizes: Sizes, faults: tuple[str, str]) -> None:
    """Of two ranks with a fault each, at least one is named, with a cause of these faults, and no innocent is."""
    job = run(sizes, Injection(faults[0], (2,)), Injection(faults[1], (5,)), seed=4)

    diagnosis = diagnose_job(tmp_path, job)

    assert diagnosis.verdict == "hang"
    assert diagnosis.suspect_ranks
    assert set(diagnosis.suspect_ranks) <= {2, 5}, diagnosis.summary
    assert set(causes(diagnosis).values()) <= set(job.truth.causes), diagnosis.summary


def test_ring_that_begins_within_a_batch(tmp_path: Path) -> None:
    """Rank 3's ring begins with the closing entry of the batch it is stuck in: what that batch lacks is forgotten."""
    job = run(SIZES["pipeline"], Injection("host_stall", (1, 4, 6)), seed=2, recorder=Recorder(frames=False, ring=20))

    assert_true(diagnose_job(tmp_path, job), job.truth)
