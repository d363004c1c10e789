"""Ranks in a cycle, told apart by what their replicas issued: a call left out, one too many, or in another order.

Hosts here block in their calls: who is stuck issues nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fr_exporter.diagnosis import Cause, Diagnosis
from tests.builders import SECOND, Dump, Group, Job, write
from tests.verdicts import assert_hang, causes, diagnose

STEPS = 4


class Replicas:
    """Two replicas of a model that is split over `tensor` ranks, after some steps of training.

    A step is an all_reduce and an all_gather among the ranks of a replica, a reduce_scatter between the two ranks with
    the same part, and an all_reduce of all.
    """

    def __init__(self, tensor: int) -> None:
        self.job = Job(2 * tensor)
        self.world = self.job.world
        halves = (self.world.ranks[:tensor], self.world.ranks[tensor:])
        self.tp = [self.job.group(f"tp{index}", "tp", half) for index, half in enumerate(halves)]
        self.dp = [self.job.group(f"dp{index}", "dp", pair) for index, pair in enumerate(zip(*halves, strict=True))]
        for _ in range(STEPS):
            self.compute()
            for dp in self.dp:
                self.job.collective(dp, "reduce_scatter")
            self.job.collective(self.world)

    def compute(self) -> None:
        """Issue the two calls of a step within each replica."""
        for tp in self.tp:
            self.job.collective(tp)
            self.job.collective(tp, "all_gather")

    def mates(self, rank: int) -> list[int]:
        """Return the other ranks of the same replica."""
        return next(tp.without(rank) for tp in self.tp if rank in tp.ranks)

    def twin(self, rank: int) -> int:
        """Return the rank with the same part of the model in the other replica."""
        return next(dp.without(rank)[0] for dp in self.dp if rank in dp.ranks)


def skip_a_call(replicas: Replicas, rank: int) -> None:
    """Leave out the all_gather, in which the rank's mates then wait; it and its twin get to the all_reduce of all."""
    job, twin = replicas.job, replicas.twin(rank)
    for tp in replicas.tp:
        job.collective(tp)
        job.collective(tp, "all_gather", by=tp.without(rank))
    for dp in replicas.dp:
        job.collective(dp, "reduce_scatter", by=dp.without(*replicas.mates(rank)))
    job.collective(replicas.world, by=[rank, twin])


def repeat_a_call(replicas: Replicas, rank: int) -> None:
    """Issue the all_gather once more: the rank is alone in it, and its twin alone in the reduce_scatter."""
    job = replicas.job
    replicas.compute()
    for tp in replicas.tp:
        job.collective(tp, "all_gather", by={rank}.intersection(tp.ranks))
    for dp in replicas.dp:
        job.collective(dp, "reduce_scatter", by=dp.without(rank))
    job.collective(replicas.world, by=replicas.world.without(rank, replicas.twin(rank)))


def swap_two_calls(replicas: Replicas, rank: int) -> None:
    """Issue the all_reduce of all before the reduce_scatter, in which the rank's twin then waits."""
    replicas.compute()
    for dp in replicas.dp:
        replicas.job.collective(dp, "reduce_scatter", by=dp.without(rank))
    replicas.job.collective(replicas.world, by=replicas.world.without(replicas.twin(rank)))


def first_that_departs(diagnosis: Diagnosis) -> tuple[str, str]:
    """Return what the only suspect issued, and what the others did, in the words of its evidence."""
    own, _, theirs = diagnosis.suspects[0].evidence.partition(", in the same role, issued ")
    return own.split()[1], theirs.split()[0]


@pytest.mark.parametrize(("tensor", "rank"), [(2, 0), (2, 3), (4, 0), (4, 6)])
@pytest.mark.parametrize(
    ("depart", "own", "theirs"),
    [
        (skip_a_call, "reduce_scatter", "all_gather"),
        (repeat_a_call, "all_gather", "reduce_scatter"),
        (swap_two_calls, "all_reduce", "reduce_scatter"),
    ],
)
def test_one_rank_departs_from_its_replicas(
    tmp_path: Path, depart: Callable[[Replicas, int], None], own: str, theirs: str, tensor: int, rank: int
) -> None:
    """All but one rank issued, or were about to issue, one sequence: the one alone is named, with its first other call.

    That holds in groups of two, where each pair by itself is a tie.
    """
    replicas = Replicas(tensor)
    depart(replicas, rank)

    diagnosis = diagnose(replicas.job.write(tmp_path))

    assert_hang(diagnosis, Cause.ORDER_DEADLOCK, [rank])
    assert diagnosis.suspects[0].confidence == "medium"
    assert first_that_departs(diagnosis) == (own, theirs)


@pytest.mark.parametrize("desc", ["", "mesh"])
@pytest.mark.parametrize("first_name", [1, 8, 9])
def test_descriptions_that_tell_nothing(tmp_path: Path, desc: str, first_name: int) -> None:
    """Two groups of a rank, of one size and one description or none, are told apart, whatever order their names have.

    Each rank calls the same in both and then in the world; rank 3 left out its call of the first.
    """
    job = Job(4)
    rows, columns = (
        [job.group(str(first_name + 2 * kind + index), desc, ranks) for index, ranks in enumerate(pairs)]
        for kind, pairs in enumerate((([0, 1], [2, 3]), ([0, 2], [1, 3])))
    )
    for _ in range(STEPS):
        for group in (*rows, *columns, job.world):
            job.collective(group)
    for group, by in ((rows[0], [0, 1]), (rows[1], [2]), (columns[0], [0]), (columns[1], [1, 3]), (job.world, [1, 3])):
        job.collective(group, by=by)

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.ORDER_DEADLOCK, [3])
    own, _, theirs = diagnosis.suspects[0].evidence.partition(", in the same role, issued ")
    assert own.startswith(f"issued all_reduce 5 of process group {columns[1].name}")
    assert theirs.startswith(f"all_reduce 5 of process group {rows[0].name}")


def test_replicas_decide_a_mismatch(tmp_path: Path) -> None:
    """Of two ranks that issue different operations as one call, it is the one whose replicas do otherwise."""
    replicas = Replicas(2)
    job, (first, second) = replicas.job, replicas.tp
    job.collective(first)
    job.collective(first, "all_gather")
    job.collective(second)
    job.collective(second, "all_gather", by=[2], done=False)
    job.collective(second, "broadcast", by=[3], done=False)
    for dp in replicas.dp:
        job.collective(dp, "reduce_scatter", by=[dp.ranks[0]])

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.COLLECTIVE_MISMATCH, [3], group=second)
    assert diagnosis.suspects[0].confidence == "medium"


def test_two_replicas_alone(tmp_path: Path) -> None:
    """Rank 1 left a call out, but only rank 0 has the same role, so nothing shows which of their sequences is right.

    Ranks 0 and 1 feed ranks 2 and 3. That all four are in the cycle makes neither of the latter a suspect.
    """
    job = Job(4)
    inputs, outputs = job.group("1", "tp", [0, 1]), job.group("2", "tp", [2, 3])
    pipelines = job.group("3", "pp", [0, 2]), job.group("4", "pp", [1, 3])
    for _ in range(STEPS):
        job.collective(inputs, "all_gather")
        for pipeline in pipelines:
            job.send(pipeline, *pipeline.ranks)
            job.recv(pipeline, *reversed(pipeline.ranks))
        job.collective(outputs, "all_gather")
        job.collective(job.world)
    job.collective(inputs, "all_gather", by=[0])
    job.send(pipelines[1], 1, 3)
    job.recv(pipelines[1], 3, 1)
    job.recv(pipelines[0], 2, 0)
    job.collective(outputs, "all_gather", by=[3])
    job.collective(job.world, by=[1])

    diagnosis = diagnose(job.write(tmp_path))

    assert diagnosis.suspect_ranks == [0, 1], diagnosis.summary
    assert set(causes(diagnosis).values()) <= {Cause.ORDER_DEADLOCK, Cause.P2P_UNMATCHED}


class Pipelines:
    """Three replicas of a model of two stages, ranks 0 to 2 and 3 to 5, after some steps of training.

    A step is a send to the second stage, one back, an all_reduce within each stage, and one of all.
    """

    def __init__(self) -> None:
        self.job = Job(6)
        self.pipelines = [self.job.group(str(1 + first), "pp", [first, first + 3]) for first in range(3)]
        self.stages = [self.job.group(str(4 + stage), "dp", range(3 * stage, 3 * stage + 3)) for stage in range(2)]
        for _ in range(STEPS):
            self.transfer()
            for stage in self.stages:
                self.job.collective(stage)
            self.job.collective(self.job.world)

    def transfer(self, *, but: Group | None = None) -> None:
        """Send forth and back in every pipeline but one."""
        for pipeline in self.pipelines:
            if pipeline is not but:
                first, last = pipeline.ranks
                self.job.send(pipeline, first, last)
                self.job.recv(pipeline, last, first)
                self.job.send(pipeline, last, first)
                self.job.recv(pipeline, first, last)


@pytest.mark.parametrize(
    ("rank", "issued", "goes_on", "own", "theirs"),
    [
        # Rank 2 waits for the answer to what it never sent.
        (2, [("recv", 2), ("recv", 5)], False, "recv", "send"),
        # Rank 3 goes on without an answer, for which rank 0 waits.
        (3, [("send", 0), ("recv", 3), ("recv", 0)], True, "all_reduce", "send"),
        # Rank 5 answers what it never took.
        (5, [("send", 2), ("send", 5)], False, "send", "recv"),
        # Rank 0 goes on without the answer, of which rank 3 then never gets rid.
        (0, [("send", 0), ("recv", 3), ("send", 3)], True, "all_reduce", "recv"),
    ],
)
def test_transfer_that_one_rank_left_out(
    tmp_path: Path, rank: int, issued: list[tuple[str, int]], goes_on: bool, own: str, theirs: str
) -> None:
    """Which of two ranks left its half out shows in what their stages did in the two other pipelines."""
    training = Pipelines()
    job, pipeline = training.job, training.pipelines[rank % 3]
    training.transfer(but=pipeline)
    for verb, issuer in issued:
        issue = job.send if verb == "send" else job.recv
        issue(pipeline, issuer, *pipeline.without(issuer))
    stuck = pipeline.without(rank) if goes_on else pipeline.ranks
    for stage in training.stages:
        job.collective(stage, by=stage.without(*stuck))
    job.collective(job.world, by=training.stages[rank // 3].ranks if goes_on else [])

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.P2P_UNMATCHED, [rank])
    assert first_that_departs(diagnosis) == (own, theirs)


def test_other_roles_are_no_departure(tmp_path: Path) -> None:
    """The ends of a pipeline call otherwise than its middle, and nobody left anything out: a link failed between them.

    Stage 0 sends what stage 1 never gets; stages 2 and 3 wait for what comes after.
    """
    job = Job(4)
    pipeline = job.group("1", "pp", range(4))
    for _ in range(STEPS):
        for source, destination in [(0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0)]:
            job.send(pipeline, source, destination)
            job.recv(pipeline, destination, source)
        job.collective(job.world)
    job.send(pipeline, 0, 1, done=False)
    job.recv(pipeline, 1, 0, done=False)
    job.recv(pipeline, 2, 1)
    job.recv(pipeline, 3, 2)

    assert_hang(diagnose(job.write(tmp_path)), Cause.COMMUNICATION_FAULT, [0, 1], group=pipeline)


@pytest.mark.parametrize("shorter", [0, 3])
def test_rings_that_begin_at_different_calls(tmp_path: Path, shorter: int) -> None:
    """Sequences are laid side by side from the first call that all rings hold, wherever in a ring that is."""
    replicas = Replicas(2)
    skip_a_call(replicas, 3)
    dumps = replicas.job.dumps()
    dumps[shorter]["entries"] = dumps[shorter]["entries"][3:]

    diagnosis = diagnose(write(tmp_path, dumps, mtime_ns=replicas.job.now_ns + 60 * SECOND))

    assert_hang(diagnosis, Cause.ORDER_DEADLOCK, [3])
    assert first_that_departs(diagnosis) == ("reduce_scatter", "all_gather")


def write_changed(tmp_path: Path, job: Job, change: Callable[[list[Dump]], list[Dump]]) -> Path:
    """Write the dumps of a job with their entries changed, a minute from its last call."""
    dumps = job.dumps()
    for dump in dumps.values():
        dump["entries"] = change(dump["entries"])
    return write(tmp_path, dumps, mtime_ns=job.now_ns + 60 * SECOND)


def test_only_active_calls_are_no_history(tmp_path: Path) -> None:
    """Rank 3 skipped a call, but the dumps hold only batches, which never complete, and what the ranks are stuck in.

    Rank 2 waits for 3, which waits for 0 and 2, and 0 for 2: the cycle is named. Nobody waits for rank 1.
    """
    replicas = Replicas(2)
    for group in (*replicas.tp, *replicas.dp, replicas.world) * STEPS:
        replicas.job.coalesced(group, "all_gather")
    skip_a_call(replicas, 3)

    def only_active(entries: list[Dump]) -> list[Dump]:
        return [entry for entry in entries if entry["state"] != "completed"]

    diagnosis = diagnose(write_changed(tmp_path, replicas.job, only_active))

    assert_hang(diagnosis, Cause.ORDER_DEADLOCK, [0, 2, 3])
    assert {suspect.confidence for suspect in diagnosis.suspects} == {"low"}


@pytest.mark.parametrize("depart", [skip_a_call, repeat_a_call, swap_two_calls])
@pytest.mark.parametrize("ring", range(1, 9))
def test_ring_shorter_than_two_steps(tmp_path: Path, depart: Callable[[Replicas, int], None], ring: int) -> None:
    """However little the rings hold, the rank at fault is among the suspects: no innocent is named without it."""
    replicas = Replicas(2)
    depart(replicas, 3)

    diagnosis = diagnose(write_changed(tmp_path, replicas.job, lambda entries: entries[-ring:]))

    assert diagnosis.verdict == "hang"
    assert 3 in diagnosis.suspect_ranks, diagnosis.summary


def test_first_step_is_no_departure(tmp_path: Path) -> None:
    """A link of the first stage fails in the first step; before it all ranks issued the same: nobody departed."""
    job = Job(4)
    pipeline = job.group("1", "pp", range(4))
    job.collective(job.world, times=10)
    job.recv(pipeline, 3, 2)
    job.recv(pipeline, 2, 1)
    job.send(pipeline, 0, 1, done=False)
    job.recv(pipeline, 1, 0, done=False)

    assert_hang(diagnose(job.write(tmp_path)), Cause.COMMUNICATION_FAULT, [0, 1], group=pipeline)


def test_departure_in_the_first_step(tmp_path: Path) -> None:
    """Rank 4 left out the recv of the first step; two other pipelines of two stages show that it did."""
    job = Job(6)
    pipelines = [job.group(str(first + 1), "pp", [first, first + 3]) for first in range(3)]
    stages = [job.group("4", "dp", range(3)), job.group("5", "dp", range(3, 6))]
    job.collective(job.world, times=10)
    for pipeline in (pipelines[0], pipelines[2]):
        first, last = pipeline.ranks
        job.send(pipeline, first, last)
        job.recv(pipeline, last, first)
        job.send(pipeline, last, first)
        job.recv(pipeline, first, last)
    job.send(pipelines[1], 1, 4)
    job.send(pipelines[1], 4, 1)
    for stage in stages:
        job.collective(stage, by=stage.without(1, 4))

    diagnosis = diagnose(job.write(tmp_path))

    assert_hang(diagnosis, Cause.P2P_UNMATCHED, [4])
    assert first_that_departs(diagnosis) == ("send", "recv")


@pytest.mark.parametrize("also_without_counters", [False, True])
def test_group_that_no_dump_lists(tmp_path: Path, also_without_counters: bool) -> None:
    """Calls of a group whose members no dump lists stand in the sequences as well, and hide nobody: rank 2 departed."""
    job = Job(4)
    tp, unlisted = job.group("1", "tp", range(4)), job.group("2", "extra", range(4))
    for _ in range(5):
        for group in (tp, unlisted, job.world):
            job.collective(group)
    job.collective(tp, by=[0, 1, 3])
    job.collective(job.world, by=[2])
    dumps = job.dumps()
    for dump in dumps.values():
        del dump["pg_config"][unlisted.name]
        if also_without_counters:
            del dump["pg_status"]["2"]

    diagnosis = diagnose(write(tmp_path, dumps, mtime_ns=job.now_ns + 60 * SECOND))

    assert_hang(diagnosis, Cause.ORDER_DEADLOCK, [2])
