"""The text and the JSON that a diagnosis becomes."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timezone

import pytest

from fr_exporter.diagnosis import Call, Camp, Cause, HungGroup, Mismatch, RankProgress, RankReport, Suspect
from fr_exporter.model import Frame, ProcessGroup, UnreadableFile
from fr_exporter.report import WIDTH, render_json, render_text
from tests.unit import diagnosis_values as values

EXPERT = ProcessGroup.of("7", "EXPERT_MODEL_PARALLEL_GROUP", (0, 1, 2, 3))
TENSOR = ProcessGroup.of("3", "TENSOR_MODEL_PARALLEL_GROUP", (2, 3))


def at(clock: str) -> int:
    """Return nanoseconds since the epoch of a time of day on 2 January 2026."""
    moment = datetime.fromisoformat(f"2026-01-02T{clock}").replace(tzinfo=timezone.utc)
    return int(moment.timestamp()) * 1_000_000_000


HEALTHY = values.diagnosis(
    training_job="default",
    world_size=4,
    expected_ranks=4,
    dumped_ranks=(0, 1, 2, 3),
    dump_versions=("2.10",),
    generated_at_ns=at("04:00:00"),
    first_dump_time_ns=at("03:14:07"),
    last_dump_time_ns=at("03:14:09"),
)

ALL_REDUCE = Call(
    operation="nccl:all_reduce",
    group=TENSOR,
    kind="collective",
    collective_seq_id=41,
    p2p_seq_id=0,
    state="completed",
    issued_ns=at("03:04:04"),
    frames=(Frame("all_reduce", "torch/distributed.py", 2501), Frame("load_batch", "train.py", 88)),
)

STALLED = Suspect(
    rank=2,
    node="node01",
    cause=Cause.HOST_STALL,
    confidence="high",
    evidence="has nothing open and issued call 20 of process group 7 (EXPERT) last, while ranks 0-1, 3 are in call 21",
    waiting_ranks=(0, 1, 3),
    last_call=ALL_REDUCE,
    health={"gpu": "Healthy"},
)

HUNG = HungGroup(
    group=EXPERT,
    cause=Cause.HOST_STALL,
    operation="nccl:all_to_all",
    kind="collective",
    collective_seq_id=21,
    p2p_seq_id=None,
    input_sizes=((4027, 5120),),
    dtypes=("BFloat16",),
    waiting_ranks=(0, 1, 3),
    waiting_on=(2,),
    since_ns=at("03:04:05"),
    frames=tuple(Frame(f"layer_{depth}", "moe.py", depth) for depth in range(9)),
)

HANG = replace(
    HEALTHY,
    verdict="hang",
    summary="Rank 2 stopped issuing calls; ranks 0, 1 and 3 wait for it.",
    cause=Cause.HOST_STALL,
    hung_process_groups=(HUNG,),
    suspects=(STALLED,),
    incident="20260102T030405Z-1a2b3c",
)


def test_a_hang_reads_from_the_answer_to_the_details() -> None:
    """The report says the verdict, who is to blame and why, then what hung, who waits, since when and where."""
    assert (
        render_text(HANG)
        == """\
HANG: Rank 2 stopped issuing calls; ranks 0, 1 and 3 wait for it.

  cause:    host_stall
  restart:  CONTINUE: a restart can help once the suspects are isolated
  job:      default, scope job, incident 20260102T030405Z-1a2b3c
  dumps:    4 of 4 ranks; written 2026-01-02T03:14:07Z to 2026-01-02T03:14:09Z; version 2.10;
            communication library 2.27.3
  source:   /dumps

Suspects
  rank 2 on node01: host_stall, high confidence
    has nothing open and issued call 20 of process group 7 (EXPERT) last, while ranks 0-1, 3 are in
      call 21
    waited for by ranks 0-1, 3
    health: gpu Healthy
    last call: nccl:all_reduce in process group 3 (TENSOR_MODEL_PARALLEL_GROUP), collective 41,
      completed, issued 2026-01-02T03:04:04Z
      at all_reduce (torch/distributed.py:2501)
      at load_batch (train.py:88)

Hung process groups (look at the first one first)
  process group 7 (EXPERT_MODEL_PARALLEL_GROUP) of ranks 0-3: nccl:all_to_all, collective 21, size
    [4027, 5120], BFloat16
    ranks 0-1, 3 waiting for rank 2 since 2026-01-02T03:04:05Z, 10 min 4 s before the last dump
      at layer_0 (moe.py:0)
      at layer_1 (moe.py:1)
      at layer_2 (moe.py:2)
      at layer_3 (moe.py:3)
      at layer_4 (moe.py:4)
      at layer_5 (moe.py:5)
      ... 3 more frames"""
    )


def test_a_healthy_set_needs_no_more_than_its_head() -> None:
    """Without a hang there is no cause, no advice on restarts and no empty section."""
    assert (
        render_text(HEALTHY)
        == """\
HEALTHY: No rank is stuck.

  job:      default, scope job
  dumps:    4 of 4 ranks; written 2026-01-02T03:14:07Z to 2026-01-02T03:14:09Z; version 2.10;
            communication library 2.27.3
  source:   /dumps"""
    )


def test_dumps_of_one_second_have_one_time() -> None:
    """A span from a time to itself tells nothing."""
    report = render_text(replace(HEALTHY, last_dump_time_ns=HEALTHY.first_dump_time_ns))
    assert "4 of 4 ranks; written 2026-01-02T03:14:07Z; version 2.10; communication" in report


def test_what_was_not_read_stands_before_the_warnings() -> None:
    """Every rank without a usable dump is named with the reason, and every file that gave none."""
    diagnosis = replace(
        HEALTHY,
        verdict="inconclusive",
        partial=True,
        summary="Too little evidence.",
        dumped_ranks=(0,),
        missing_ranks=(1,),
        pending_ranks=(2, 3),
        stale_ranks=(4, 5, 6, 9),
        remote_ranks=tuple(range(8, 4096)),
        unreadable_files=(UnreadableFile("/dumps/_dump_7", 7, "empty: nothing is written yet", "partial"),),
        warnings=("No file matches _dump_*: read the files named nccl_trace_rank_<rank> instead.",),
    )
    report = render_text(diagnosis)
    assert report.startswith("INCONCLUSIVE (partial: ranks may still be writing): Too little evidence.\n")
    assert report.endswith(
        """

Not read
  missing: rank 1 (no dump)
  pending: ranks 2-3 (may still write)
  stale: ranks 4-6, 9 (only a dump of an earlier time, left out)
  remote: ranks 8-4095 (outside this node)
  unreadable: /dumps/_dump_7: empty: nothing is written yet

Warnings
  No file matches _dump_*: read the files named nccl_trace_rank_<rank> instead."""
    )


def test_a_mismatch_reads_as_camps() -> None:
    """The largest camp stands first, each with what it issued and its ranks."""
    mismatch = Mismatch(EXPERT, 39, "size", (Camp("[1025]", (0, 1, 3)), Camp("[262144]", (2,))))
    assert """
Mismatches
  process group 7 (EXPERT_MODEL_PARALLEL_GROUP): collective 39, not the same size everywhere
    [1025]: ranks 0-1, 3
    [262144]: rank 2""" in render_text(replace(HANG, mismatches=(mismatch,)))


def test_suspects_with_the_same_finding_share_a_block() -> None:
    """A communication fault has all members as suspects: a thousand share one block, below the surer finding."""
    weak = replace(STALLED, cause=Cause.COMMUNICATION_FAULT, confidence="low", node=None, waiting_ranks=())
    suspects = [replace(weak, rank=rank) for rank in range(1024)]
    suspects[500] = replace(STALLED, rank=500)
    report = render_text(replace(HANG, suspects=tuple(suspects)))
    blocks = [line for line in report.splitlines() if line.endswith("confidence")]
    assert blocks == [
        "  rank 500 on node01: host_stall, high confidence",
        "  ranks 0-499, 501-1023: communication_fault, low confidence",
    ]
    assert "low confidence\n    each has nothing open" in report
    assert "    last call of rank 0: nccl:all_reduce in" in report


def test_a_copied_files_time_makes_no_span() -> None:
    """Dumps that say they were written a year after the call were copied: how long it was stuck is not claimed."""
    report = render_text(replace(HANG, last_dump_time_ns=at("03:14:09") + 365 * 86_400 * 1_000_000_000))
    assert "    ranks 0-1, 3 waiting for rank 2 since 2026-01-02T03:04:05Z\n" in report


def test_many_findings_end_in_how_many_are_left_out() -> None:
    """A long list is cut after 16 findings, and the report says how many suspects it leaves out and where they are."""
    suspects = tuple(replace(STALLED, rank=rank, evidence=f"stopped after call {rank}") for rank in range(100))
    report = render_text(replace(HANG, suspects=suspects))
    assert "stopped after call 15\n" in report
    assert "stopped after call 16\n" not in report
    assert "  and 84 more suspects: --format json has them all\n" in report


def test_verbose_adds_each_ranks_state_and_each_groups_progress() -> None:
    """One row a rank says what it is stuck in; ranks at the same counters share a row, those that lag first."""
    waiting = Call("nccl:all_to_all", EXPERT, "collective", 21, None, "scheduled", at("03:04:05"))
    ahead = (RankProgress(EXPERT, "collective", 21, None, 20, 1),)
    behind = (RankProgress(EXPERT, "collective", 20, None, 20, 0),)
    ranks = (
        RankReport(0, None, at("03:14:07"), waiting, ahead, {}),
        RankReport(1, None, at("03:14:07"), waiting, ahead, {}),
        RankReport(2, "node01", at("03:14:09"), None, behind, {}),
        RankReport(3, None, None, waiting, ahead, {}),
    )
    diagnosis = replace(HANG, ranks=ranks)
    stuck = (
        "nccl:all_to_all in process group 7 (EXPERT_MODEL_PARALLEL_GROUP), "
        "collective 21, scheduled, issued 2026-01-02T03:04:05Z"
    )
    assert render_text(diagnosis, verbose=True) == render_text(diagnosis) + (
        f"""

Ranks
  rank  node    dump written          stuck in
  0     -       2026-01-02T03:14:07Z  {stuck}
  1     -       2026-01-02T03:14:07Z  {stuck}
  2     node01  2026-01-02T03:14:09Z  nothing
  3     -       unknown               {stuck}

Progress
  process group  description                  kind        enqueued  started  completed  open  ranks
  7              EXPERT_MODEL_PARALLEL_GROUP  collective  20        -        20         0     2
  7              EXPERT_MODEL_PARALLEL_GROUP  collective  21        -        20         1     0-1,3"""
    )


def test_progress_shows_the_hung_group_first_and_the_rest_by_number() -> None:
    """What one looks for stands on top; group 10 comes after group 9, whichever rank was read first."""
    groups = [ProcessGroup.of(name, "", (0, 1)) for name in ("10", "9", "0")]
    ranks = (RankReport(0, None, None, None, tuple(values.progress(of, 5, 5) for of in (*groups, EXPERT)), {}),)
    report = render_text(replace(HANG, ranks=ranks), verbose=True)
    rows = report.partition("\nProgress\n")[2].splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["7", "0", "9", "10"]


def test_health_checks_show_the_odd_ones_first() -> None:
    """One failed device among many healthy ones is the first line; without any results the report says so."""
    ranks = tuple(RankReport(rank, None, None, None, (), {"gpu": "Healthy"}) for rank in range(4))
    failed = (*ranks[:3], replace(ranks[3], health={"gpu": "Failed"}))
    assert render_text(replace(HANG, ranks=failed), health_check=True).endswith(
        """

Health checks
  gpu Failed: rank 3
  gpu Healthy: ranks 0-2"""
    )
    assert render_text(HANG, health_check=True).endswith("\n\nHealth checks\n  no dump holds health_check_results")


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param("\x1b[2J\x1b[H", id="clears the screen"),
        pytest.param("x\nHEALTHY: all is well", id="forges a line"),
        pytest.param("x\r\x9b1A", id="8-bit control"),
        pytest.param("\u202egnp.exe", id="turns the reading direction"),
        pytest.param("\ud800", id="lone surrogate"),
        pytest.param("\u2028", id="line separator"),
    ],
)
def test_a_dump_cannot_drive_the_terminal(hostile: str) -> None:
    """Whatever characters a dump's strings hold, every line of the report is one line of printable, encodable text."""
    group = ProcessGroup.of(hostile, hostile, (0, 1))
    frame = Frame(hostile, hostile, 1)
    call = replace(ALL_REDUCE, operation=hostile, group=group, state=hostile, frames=(frame,))
    report = RankReport(0, hostile, None, call, (RankProgress(group, "p2p", 1, 1, 1, 0),), {hostile: hostile})
    hung = replace(HUNG, group=group, operation=hostile, dtypes=(hostile,), frames=(frame,))
    diagnosis = replace(
        HANG,
        training_job=hostile,
        source=hostile,
        summary=hostile,
        suspects=(replace(STALLED, node=hostile, evidence=hostile, last_call=call, health={hostile: hostile}),),
        hung_process_groups=(hung,),
        mismatches=(Mismatch(group, 1, "dtype", (Camp(hostile, (0,)),)),),
        unreadable_files=(UnreadableFile(hostile, None, hostile, "partial"),),
        warnings=(hostile,),
        ranks=(report,),
        dump_versions=(hostile,),
        comm_lib_versions=(hostile,),
    )
    text = render_text(diagnosis, verbose=True, health_check=True)
    assert all(line.isprintable() for line in text.split("\n"))
    assert not any(line.startswith("HEALTHY") for line in text.splitlines())
    assert json.loads(render_json(diagnosis).encode("ascii"))["summary"] == hostile


def test_long_lists_of_ranks_wrap() -> None:
    """Prose and lists of ranks keep to the width; a list with thousands of gaps is cut with a count."""
    odd = tuple(range(1, 16384, 2))
    report = render_text(replace(HANG, missing_ranks=odd, dumped_ranks=()))
    assert all(len(line) <= WIDTH for line in report.splitlines())
    assert "…+" in report


def test_json_is_the_diagnosis() -> None:
    """The JSON text is `to_dict` and nothing else."""
    assert json.loads(render_json(HANG)) == HANG.to_dict()
