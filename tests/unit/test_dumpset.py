"""Which files form the present dump set, as time passes and files change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from fr_exporter.dumpset import DumpSetTracker, Outcome, final_set
from fr_exporter.model import Calls, DumpFile, RankDump
from tests.unit.dumpset_values import BEGIN, FRAME, MINUTE, SECOND, dump, file, group, settings, unreadable

HOUR = 60 * MINUTE
DAY = 24 * HOUR
ALL = [0, 1, 2, 3]


def with_ranks(*ranks: int, now: float = 0.0, issued_s: float = 1.0) -> DumpSetTracker:
    """Return a tracker of a job of 4 ranks, some of which dumped at `now`."""
    tracker = DumpSetTracker(settings())
    for rank in ranks:
        tracker.seen(file(rank), dump(rank, issued_s=[issued_s]), now=now)
    return tracker


def final(*files: tuple[DumpFile, Outcome]) -> tuple[list[int], list[int]]:
    """Return the ranks of the usable and of the stale dumps among final files."""
    found = final_set(files, settings())
    return list(found.dumps), sorted(found.stale)


# A rewrite


def test_rewrite_with_newer_calls_opens_a_new_set() -> None:
    """The rank that shows newer calls is alone in the new set; the files of the others are stale and out."""
    tracker = with_ranks(*ALL)
    tracker.seen(file(2), dump(2, issued_s=[1, 31]), now=30)
    present = tracker.present(30)
    assert list(present.dumps) == [2]
    assert present.stale == {0, 1, 3}
    assert present.partial
    assert tracker.serial == 2


def test_others_join_the_set_that_a_rewrite_opened() -> None:
    """Newer calls open a set once: the next ranks to rewrite belong to it, although theirs are newer too."""
    tracker = with_ranks(*ALL)
    for rank in ALL:
        tracker.seen(file(rank), dump(rank, issued_s=[1, 31 + rank]), now=30 + rank)
    assert list(tracker.present(34).dumps) == ALL
    assert tracker.serial == 2


def test_rewrite_with_the_same_last_call_replaces_and_keeps_frames() -> None:
    """A second attempt is written without stacks: those read before stay with the same calls, and only with those."""
    tracker = DumpSetTracker(settings())
    tracker.seen(file(0), dump(0, issued_s=[1, 2], frames=True), now=0)
    tracker.seen(file(0, mtime_s=15), dump(0, issued_s=[2], first_record=1, enqueued=2), now=15)
    (replaced,) = tracker.present(15).dumps.values()
    assert tracker.serial == 1
    assert replaced.progress[0].last_enqueued == 2
    assert [operation.frames for operation in replaced.operations] == [(FRAME,)]
    tracker.seen(file(0, mtime_s=20), dump(0, issued_s=[2, 3], first_record=1), now=20)
    assert [operation.frames for operation in tracker.present(20).dumps[0].operations] == [(FRAME,), ()]


def test_frames_stay_with_a_call_beyond_its_set() -> None:
    """A rank that is still where it was an hour ago keeps its stack; another process's call of that number has none."""
    for issued_s, frames in ((1, (FRAME,)), (HOUR, ())):
        tracker = with_ranks(1)
        tracker.seen(file(0), dump(0, issued_s=[1], frames=True), now=0)
        for rank in (1, 0):
            tracker.seen(file(rank), dump(rank, issued_s=[issued_s]), now=HOUR)
        assert tracker.serial == 2
        assert tracker.present(HOUR).dumps[0].operations[0].frames == frames


@pytest.mark.parametrize(
    ("before", "after", "newer"),
    [
        (dump(0, issued_s=[1], first_record=500), dump(0, issued_s=[50], first_record=3), True),
        (dump(0, issued_s=[None], first_record=7), dump(0, issued_s=[None], first_record=8), True),
        (dump(0, issued_s=[None], first_record=7), dump(0, issued_s=[None], first_record=7), False),
        (dump(0, issued_s=[], enqueued=9), dump(0, issued_s=[], enqueued=10), True),
        (dump(0, issued_s=[], enqueued=9), dump(0, issued_s=[], enqueued=9), False),
        (dump(0, issued_s=[5, 6]), dump(0, issued_s=[5]), False),
    ],
    ids=["restarted process", "no times", "no times, same", "no entries", "no entries, same", "late first attempt"],
)
def test_what_shows_newer_calls(before: RankDump, after: RankDump, newer: bool) -> None:
    """The newest issue time, the last record ID or the counters of a rewrite: any of them that both dumps tell."""
    tracker = with_ranks(1)
    tracker.seen(file(0), before, now=0)
    tracker.seen(file(0), after, now=30)
    assert (tracker.serial == 2) is newer
    assert (list(tracker.present(30).dumps) == [0]) is newer


def test_a_rank_stuck_where_it_was_may_write_first() -> None:
    """The culprit of the next incident shows no newer calls, and may write just before the rank that opens the set."""
    tracker = with_ranks(*ALL)
    tracker.seen(file(3), dump(3), now=60.0)
    for rank in (0, 1, 2):
        tracker.seen(file(rank), dump(rank, issued_s=[1, 50]), now=60.5)
    present = tracker.present(61)
    assert list(present.dumps) == ALL
    assert not present.partial


def test_one_moment_opens_one_set() -> None:
    """Two ranks that both dump twice within a second, seen at once, are in one new set."""
    tracker = with_ranks(0, 1)
    for rank in (0, 1):
        tracker.seen(file(rank), dump(rank, issued_s=[1, 1.4]), now=0.5)
    assert (tracker.serial, list(tracker.present(1).dumps)) == (2, [0, 1])


def test_a_file_that_is_replaced_counts_as_rewritten() -> None:
    """A polling watcher shows a rename onto a file as deleted, then created."""
    tracker = with_ranks(*ALL)
    tracker.gone("/dumps/_dump_0")
    tracker.seen(file(0), dump(0, issued_s=[1, 40]), now=40)
    assert tracker.serial == 2
    assert list(tracker.present(40).dumps) == [0]


def test_a_file_removed_before_the_set_opened_is_no_rewrite_in_it() -> None:
    """Rank 3's file was cleaned up after the last set; its next dump joins the one that rank 0 opened."""
    tracker = with_ranks(*ALL)
    tracker.gone("/dumps/_dump_3")
    for rank in (0, 3):
        tracker.seen(file(rank), dump(rank, issued_s=[1, 40]), now=40 + rank)
    assert tracker.serial == 2
    assert list(tracker.present(43).dumps) == [0, 3]


# Quiet


@pytest.mark.parametrize(("pause", "opens"), [(120, False), (121, True)])
def test_quiet_beyond_the_window_separates_sets(pause: float, opens: bool) -> None:
    """The first change after more than 2 min without any opens a set, whatever it shows."""
    tracker = with_ranks(0, 1)
    tracker.seen(file(2), dump(2), now=pause)
    present = tracker.present(pause)
    assert list(present.dumps) == ([2] if opens else [0, 1, 2])
    assert present.stale == ({0, 1} if opens else set())
    assert tracker.serial == (2 if opens else 1)


def test_each_change_prolongs_the_set() -> None:
    """Quiet counts from the last change, not from the first."""
    tracker = with_ranks(0)
    tracker.seen(file(1), dump(1), now=100)
    tracker.seen(file(2), dump(2), now=200)
    assert list(tracker.present(200).dumps) == [0, 1, 2]


def test_running_daemon_measures_quiet_by_its_own_clock() -> None:
    """The mtimes of a file server whose clock is days off separate nothing while the daemon watches."""
    tracker = DumpSetTracker(settings())
    for rank, mtime_s in enumerate([0, -DAY, 5 * DAY, 0]):
        tracker.seen(file(rank, mtime_s=mtime_s), dump(rank), now=rank)
    assert list(tracker.present(4).dumps) == ALL


def test_final_files_are_separated_by_their_mtimes() -> None:
    """Of two groups of files more than 2 min apart the newer is the set; 2 min apart they are one."""
    older = [(file(rank, mtime_s=0), dump(rank)) for rank in (0, 1)]
    assert final(*older, (file(2, mtime_s=120), dump(2))) == ([0, 1, 2], [])
    assert final(*older, (file(2, mtime_s=121), dump(2))) == ([2], [0, 1])


def test_start_up_scan_measures_by_mtimes_and_goes_on_by_the_clock() -> None:
    """A set 100 s old at start-up has no grace left and takes changes for 20 s more; then comes the next set."""
    for pause, ranks in ((20, [0, 1, 2]), (21, [2])):
        tracker = DumpSetTracker(settings())
        tracker.found([(file(rank), dump(rank)) for rank in (0, 1)], now=5000, wall_ns=(BEGIN + 100) * SECOND)
        assert list(tracker.present(5000).dumps) == [0, 1]
        assert not tracker.present(5000).partial
        assert tracker.quiet_s(5000) == pytest.approx(100)
        assert tracker.at_startup
        tracker.seen(file(2, mtime_s=100), dump(2), now=5000 + pause)
        assert list(tracker.present(5000 + pause).dumps) == ranks
        assert tracker.at_startup is (pause == 20)


def test_young_set_found_at_start_up_has_the_rest_of_its_grace() -> None:
    """A restart 40 s after the first file leaves 20 s for the others."""
    tracker = DumpSetTracker(settings())
    tracker.found([(file(0), dump(0))], now=5000, wall_ns=(BEGIN + 40) * SECOND)
    assert tracker.present(5019).partial
    assert tracker.deadline(5000) == pytest.approx(5020)
    assert not tracker.present(5021).partial


def test_old_files_found_beside_a_live_set_stay_out_of_it() -> None:
    """A directory that comes back with yesterday's files neither joins the present set nor ends it."""
    tracker = with_ranks(0, 1, now=5000)
    old = [(file(rank, mtime_s=-DAY, path=f"/other/rank_{rank}"), dump(rank)) for rank in (2, 3)]
    tracker.found(old, now=5010, wall_ns=BEGIN * SECOND)
    present = tracker.present(5010)
    assert list(present.dumps) == [0, 1]
    assert present.stale == {2, 3}
    assert tracker.serial == 1
    assert not tracker.at_startup
    assert tracker.quiet_s(5010) == 10
    tracker.found([(file(3, mtime_s=-30), dump(3))], now=5010, wall_ns=BEGIN * SECOND)
    assert list(tracker.present(5010).dumps) == [0, 1, 3]
    assert tracker.quiet_s(5010) == 10
    tracker.found([(file(0, mtime_s=-DAY), dump(0))], now=5010, wall_ns=BEGIN * SECOND)
    assert list(tracker.present(5010).dumps) == [1, 3]


def test_unknown_mtime_counts_as_just_now() -> None:
    """A file that cannot even be stat'ed is named, not taken for one of 1970."""
    nameless = DumpFile(path="/dumps/_dump_3", rank=3, node=None, mtime_ns=0, size=0)
    found = final_set([(file(0), dump(0)), (nameless, unreadable(3))], settings())
    assert list(found.dumps) == [0]
    assert [entry.rank for entry in found.unreadable] == [3]


# Grace


def test_set_is_partial_until_every_expected_rank_has_dumped() -> None:
    """All members of the dumps' groups are expected."""
    tracker = with_ranks(0, 1, 2)
    assert tracker.present(1).partial
    assert tracker.deadline(1) == 60
    tracker.seen(file(3), dump(3), now=2)
    assert not tracker.present(2).partial
    assert tracker.deadline(2) is None


def test_grace_runs_from_the_first_file() -> None:
    """60 s after the set's first file it is final, later files or not."""
    tracker = with_ranks(0)
    tracker.seen(file(1), dump(1), now=50)
    assert tracker.present(59.9).partial
    assert not tracker.present(60).partial
    assert tracker.deadline(60) is None


def test_world_size_given_decides_whom_to_expect() -> None:
    """A job of 5 of which the groups of the first dumps name 4."""
    tracker = DumpSetTracker(settings(world_size=5))
    for rank in ALL:
        tracker.seen(file(rank), dump(rank), now=0)
    assert tracker.present(1).partial
    tracker.seen(file(4), dump(4, groups=[group("1", [3, 4])]), now=1)
    assert not tracker.present(1).partial
    assert tracker.present(1).world_size == 5


def test_without_known_groups_only_the_grace_ends_the_waiting() -> None:
    """The dumps of torch 2.2 do not say who else there is."""
    tracker = DumpSetTracker(settings())
    tracker.seen(file(0), RankDump(0, None, "/dumps/_dump_0", "", None, (), (), Calls.of([]), {}, None), now=0)
    assert tracker.present(59).partial
    assert not tracker.present(60).partial


def test_node_waits_for_the_ranks_that_dumped_there_before() -> None:
    """Of a job of 4 ranks 0 and 1 run here: the first set waits out its grace, the next one for those two."""
    tracker = DumpSetTracker(settings(scope="node"))
    for rank in (0, 1):
        tracker.seen(file(rank), dump(rank), now=0)
    assert tracker.present(59).partial
    assert not tracker.present(60).partial
    tracker.seen(file(0), dump(0, issued_s=[HOUR]), now=HOUR)
    assert tracker.present(HOUR).partial
    tracker.seen(file(1), dump(1, issued_s=[HOUR]), now=HOUR + 1)
    assert not tracker.present(HOUR + 1).partial
    assert tracker.present(HOUR + 1).seen_ranks == {0, 1}


def test_ranks_that_are_no_more_are_not_expected() -> None:
    """After a restart with fewer ranks those beyond the new world are stale, and not among the ranks to wait for."""
    tracker = DumpSetTracker(settings(scope="node"))
    for rank in range(8):
        tracker.seen(file(rank), dump(rank, world=range(8)), now=0)
    for rank in ALL:
        tracker.seen(file(rank), dump(rank, issued_s=[HOUR]), now=HOUR)
    present = tracker.present(HOUR)
    assert present.stale == {4, 5, 6, 7}
    assert present.seen_ranks == {0, 1, 2, 3}
    assert not present.partial


def test_final_set_is_never_partial() -> None:
    """`analyze` takes the files as final: absent ranks are missing at once."""
    assert not final_set([(file(0), dump(0))], settings()).partial


def test_empty_set() -> None:
    """Without any file there is nothing to wait for."""
    present = final_set([], settings())
    assert (present.dumps, present.stale, present.partial) == ({}, frozenset(), False)
    assert DumpSetTracker(settings()).deadline(0) is None


# Contents


@pytest.mark.parametrize(("lag_s", "stale"), [(720, []), (721, [3])])
def test_contents_far_behind_are_stale(lag_s: float, stale: list[int]) -> None:
    """A file just written may hold old calls: beyond the window of 2 min and the timeout of 10 min it is out."""
    tracker = with_ranks(0, 1, 2, issued_s=1000)
    tracker.seen(file(3), dump(3, issued_s=[1000 - lag_s], timeout_ms=1000), now=1)
    present = tracker.present(1)
    assert sorted(present.stale) == stale
    assert (3 in present.dumps) is not bool(stale)
    assert len(present.warnings) == len(stale)


def test_dump_without_entries_is_never_stale_by_its_contents() -> None:
    """A culprit may dump no entries at all, and its groups may be those of an earlier time."""
    files = [(file(rank), dump(rank, issued_s=[HOUR])) for rank in (0, 1, 2)]
    assert final(*files, (file(3), dump(3, issued_s=[]))) == (ALL, [])
    assert final(*files, (file(3), dump(3, issued_s=[], world=range(8)))) == (ALL, [])


def leftovers(issued_s: float | None, ranks: Sequence[int] = (4, 5, 6, 7)) -> list[tuple[DumpFile, Outcome]]:
    """Return files of a former attempt with 8 ranks."""
    groups = {rank: [group("1", [rank % 4, rank % 4 + 4]), group("0", range(8))] for rank in ranks}
    return [(file(rank), dump(rank, issued_s=[issued_s], groups=groups[rank])) for rank in ranks]


def fresh(issued_s: float | None, ranks: Sequence[int] = (0, 1, 2, 3)) -> list[tuple[DumpFile, Outcome]]:
    """Return files of the present attempt with 4 ranks."""
    groups = {rank: [group("1", [rank // 2 * 2, rank // 2 * 2 + 1]), group("0", range(4))] for rank in ranks}
    return [(file(rank), dump(rank, issued_s=[issued_s], groups=groups[rank])) for rank in ranks]


@pytest.mark.parametrize("times", [(500, 400), (400, 400), (None, None), (None, 400)])
def test_leftovers_of_a_larger_attempt_are_stale(times: tuple[float | None, float | None]) -> None:
    """Field case F22, the mtimes all equal: told by issue times, else by numbers, else by the smallest rank."""
    found = final_set([*leftovers(times[1]), *fresh(times[0])], settings())
    assert list(found.dumps) == ALL
    assert found.stale == {4, 5, 6, 7}
    assert found.seen_ranks == {0, 1, 2, 3}
    assert len(found.warnings) == 1
    assert "4-7" in found.warnings[0]


def test_later_side_wins_whatever_its_size() -> None:
    """Two ranks of the present attempt have dumped so far, beside six older files."""
    assert final(*fresh(500, [0, 1]), *leftovers(400, range(2, 8))) == ([0, 1], [2, 3, 4, 5, 6, 7])


def test_larger_side_wins_where_times_do_not_tell() -> None:
    """Two against six, at equal times: one camp is out as a whole, also where a small group would have it otherwise."""
    assert final(*fresh(400, [0, 1]), *leftovers(400, range(2, 8))) == ([2, 3, 4, 5, 6, 7], [0, 1])


def test_a_former_attempt_with_fewer_ranks_is_told_too() -> None:
    """Rank 3's file is of an attempt with 4 ranks; its members are all among the present 8."""
    files = leftovers(500, [0, 1, 2, 4, 5, 6, 7])
    assert final(*files, *fresh(400, [3])) == ([0, 1, 2, 4, 5, 6, 7], [3])


def test_same_name_with_disjoint_members_is_no_contradiction() -> None:
    """Each tensor-parallel group may have the same name on its own ranks; nor does the order of members matter."""
    files = [(file(rank), dump(rank, groups=[group("tp", [rank // 2 * 2, rank // 2 * 2 + 1])])) for rank in ALL]
    files[1] = (file(1), dump(1, groups=[group("tp", [1, 0])]))
    assert final(*files) == (ALL, [])


def test_stale_dumps_of_a_live_set_keep_it_waiting() -> None:
    """An old dump copied over a rank's file does not stand for that rank."""
    tracker = with_ranks(0, 1, 2, issued_s=DAY)
    tracker.seen(file(3), dump(3, issued_s=[1]), now=1)
    assert tracker.present(1).partial


# Several files of one rank


def test_newer_of_two_files_of_one_rank_is_used() -> None:
    """Field case F24: by mtime, at a tie by the newest call, then by path; said in a warning."""
    plain, json = "/dumps/nccl_trace_rank_0", "/dumps/nccl_trace_rank_0.json"

    def used(plain_s: tuple[float, float], json_s: tuple[float, float]) -> float:
        found = final_set(
            [
                (file(0, path=plain, mtime_s=plain_s[0]), dump(0, issued_s=[plain_s[1]])),
                (file(0, path=json, mtime_s=json_s[0]), dump(0, issued_s=[json_s[1]])),
            ],
            settings(),
        )
        (warning,) = found.warnings
        assert "nccl_trace_rank_0.json" in warning
        assert not found.stale
        return ((found.dumps[0].operations[0].issued_ns or 0) - BEGIN * SECOND) / SECOND

    assert used((10, 1), (0, 2)) == 1
    assert used((0, 1), (10, 2)) == 2
    assert used((0, 2), (0, 1)) == 2


def test_one_rank_on_two_hosts() -> None:
    """The same rank in the files of two hosts: the newer, and both files are named."""
    found = final_set(
        [
            (file(5, path="/dumps/rank_node02_5", node="node02"), dump(5)),
            (file(5, path="/dumps/rank_node07_5", node="node07", mtime_s=9), dump(5, issued_s=[2])),
        ],
        settings(),
    )
    assert found.dumps[5].operations[0].issued_ns == (BEGIN + 2) * SECOND
    assert "rank_node07_5 instead of rank_node02_5" in found.warnings[0]


def of_node(node: str, rank: int, *, issued_s: float = 1.0) -> tuple[DumpFile, Outcome]:
    """Return what a node brought of a rank."""
    return file(rank, path=f"s3://b/{node}#{rank}", node=node), dump(rank, issued_s=[issued_s])


@pytest.mark.parametrize(
    ("other", "usable", "refused", "stale"),
    [
        pytest.param(of_node("b", 0, issued_s=2), [1], [0], [], id="different"),
        pytest.param(of_node("b", 0), [0, 1], [], [], id="the-same"),
        pytest.param(of_node("b", 0, issued_s=-HOUR), [0, 1], [], [], id="stale"),
    ],
)
def test_a_rank_that_two_nodes_brought_is_used_where_they_agree(
    other: tuple[DumpFile, Outcome], usable: list[int], refused: list[int], stale: list[int]
) -> None:
    """Of different dumps nobody knows which is right: both nodes are named; a stale one has no say."""
    found = final_set([of_node("a", 0), of_node("a", 1), other], replace(settings(), by_node=True))
    assert list(found.dumps) == usable
    assert [why.rank for why in found.unreadable] == refused
    assert sorted(found.stale) == stale
    for why in found.unreadable:
        assert (why.result, "nodes a and b" in why.error) == ("rejected", True)
        assert any("rank 0" in warning for warning in found.warnings)


# Unreadable files


def test_half_written_rewrite_keeps_the_dump_and_is_named() -> None:
    """Torch truncates in place: until the file can be read again the rank's last dump stands in the set."""
    tracker = with_ranks(*ALL)
    tracker.seen(file(1), unreadable(1), now=10)
    present = tracker.present(10)
    assert list(present.dumps) == ALL
    assert present.unreadable == (unreadable(1),)
    assert (tracker.serial, present.partial) == (1, False)
    tracker.seen(file(1), dump(1), now=11)
    assert (tracker.serial, tracker.present(11).unreadable) == (1, ())
    tracker.seen(file(1), unreadable(1), now=20)
    tracker.seen(file(1), dump(1, issued_s=[1, 21]), now=21)
    assert (tracker.serial, list(tracker.present(21).dumps)) == (2, [1])


def test_rank_with_a_half_written_file_is_waited_for() -> None:
    """It may yet be completed within the grace, whether a group names it or not; then it stays named."""
    tracker = with_ranks(0, 1, 2)
    tracker.seen(file(4), unreadable(4), now=1)
    tracker.seen(file(3), dump(3), now=1)
    assert tracker.present(1).partial
    assert not tracker.present(60).partial

    tracker = with_ranks(0, 1, 2)
    tracker.seen(file(3), unreadable(3), now=1)
    assert tracker.present(1).partial
    assert not tracker.present(60).partial
    assert tracker.present(60).unreadable == (unreadable(3),)
    assert not tracker.present(60).stale
    tracker.seen(file(3), dump(3), now=70)
    assert (list(tracker.present(70).dumps), tracker.present(70).unreadable) == (ALL, ())


def test_half_written_file_belongs_to_the_set_that_comes() -> None:
    """Rank 1 is still writing when rank 0's dump opens the next set: it is unreadable there, its old dump is out."""
    tracker = with_ranks(*ALL)
    tracker.seen(file(1), unreadable(1), now=HOUR)
    assert (tracker.serial, list(tracker.present(HOUR).dumps)) == (1, ALL)
    tracker.seen(file(0), dump(0), now=HOUR + 10)
    present = tracker.present(HOUR + 10)
    assert (tracker.serial, list(present.dumps)) == (2, [0])
    assert present.unreadable == (unreadable(1),)
    assert present.stale == {2, 3}
    tracker.seen(file(1), dump(1), now=HOUR + 11)
    assert (tracker.serial, list(tracker.present(HOUR + 11).dumps)) == (2, [0, 1])


def test_half_written_file_of_an_earlier_set_is_stale() -> None:
    """A rank killed while it wrote, an hour before the present set, tells nothing about that set."""
    tracker = with_ranks(0, 1, 2)
    tracker.seen(file(3), unreadable(3), now=1)
    tracker.seen(file(0), dump(0, issued_s=[HOUR]), now=HOUR)
    assert not tracker.present(HOUR).unreadable
    assert tracker.present(HOUR).stale == {1, 2, 3}


def test_broken_file_beside_older_good_ones_does_not_replace_them() -> None:
    """Of final files the newest may be the one that cannot be read: the others are still the set."""
    found = final_set([*((file(rank), dump(rank)) for rank in ALL), (file(4, mtime_s=DAY), unreadable(4))], settings())
    assert list(found.dumps) == ALL
    assert found.unreadable == (unreadable(4),)


# Files that go


def test_file_that_is_gone_leaves_the_set() -> None:
    """Its rank is missing then; when the last file is gone the set is empty, whatever older files remain."""
    tracker = with_ranks(0, 1)
    tracker.seen(file(2), dump(2), now=HOUR)
    tracker.seen(file(3), unreadable(3), now=HOUR)
    tracker.gone("/dumps/_dump_2")
    tracker.gone("/dumps/no_such_file")
    assert not tracker.present(HOUR).dumps
    assert tracker.present(HOUR).unreadable
    tracker.gone("/dumps/_dump_3")
    present = tracker.present(HOUR)
    assert (present.dumps, present.unreadable, present.partial) == ({}, (), False)
    assert present.stale == {0, 1}
    assert tracker.serial == 2


def test_first_file_after_an_empty_set_opens_the_next() -> None:
    """A job that cleans up and starts again within the window is another set."""
    tracker = with_ranks(*ALL)
    for rank in ALL:
        tracker.gone(f"/dumps/_dump_{rank}")
    tracker.seen(file(0), unreadable(0), now=10)
    assert (tracker.serial, dict(tracker.present(10).dumps)) == (2, {})
    tracker.seen(file(0), dump(0), now=11)
    assert (tracker.serial, list(tracker.present(11).dumps)) == (2, [0])


def test_target_is_passed_through() -> None:
    """The set carries the names of its target."""
    present = with_ranks(0).present(math.inf)
    assert (present.training_job, present.source, present.scope) == ("llm", "/dumps", "job")
