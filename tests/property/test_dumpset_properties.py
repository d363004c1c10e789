"""What holds for any history of files."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fr_exporter.dumpset import DumpSetTracker, final_set
from fr_exporter.model import DumpFile, DumpSet, Scope
from tests.property.strategies_dumpset import DIRECTORIES, HISTORIES, Found
from tests.unit.dumpset_values import BEGIN, SECOND, settings

History = list[tuple[float, list[Found], set[str]]]
SCOPES = st.sampled_from(["job", "node"])


def replay(tracker: DumpSetTracker, history: History) -> Iterator[tuple[float, dict[str, DumpFile]]]:
    """Play a history; yield the time and the files that are there after each step."""
    now = 1000.0
    there: dict[str, DumpFile] = {}
    for pause, files, gone in history:
        now += pause
        for path in sorted(gone):
            tracker.gone(path)
            there.pop(path, None)
        for file, outcome in files:
            tracker.seen(file, outcome, now=now)
            there[file.path] = file
        yield now, there


def covered(present: DumpSet) -> set[int]:
    """Return the ranks that a set says something of."""
    return {*present.dumps, *present.stale, *(entry.rank for entry in present.unreadable if entry.rank is not None)}


@given(HISTORIES, SCOPES)
def test_every_file_is_accounted_for(history: History, scope: Scope) -> None:
    """A rank with a file has a usable dump, a stale one or an unreadable one; nobody else has."""
    tracker = DumpSetTracker(settings(scope=scope))
    for now, there in replay(tracker, history):
        present = tracker.present(now)
        assert covered(present) == {file.rank for file in there.values()}
        assert not present.dumps.keys() & present.stale
        assert all(rank == dump.rank for rank, dump in present.dumps.items())
        assert present.dumps.keys() <= present.seen_ranks


@given(DIRECTORIES, HISTORIES)
def test_serial_only_grows(at_startup: list[Found], history: History) -> None:
    """The number of the present set never falls, and stays as long as nothing changes."""
    tracker = DumpSetTracker(settings())
    tracker.found(at_startup, now=1000.0, wall_ns=BEGIN * SECOND)
    last = tracker.serial
    for now, _ in replay(tracker, history):
        assert tracker.serial >= last
        last = tracker.serial
        tracker.present(now + 1e6)
        assert tracker.serial == last


@given(HISTORIES, SCOPES, st.floats(0, 1))
def test_deadline_is_truthful(history: History, scope: Scope, fraction: float) -> None:
    """Between two changes the set stays as it is until the deadline, differs from then on, and never changes again."""
    tracker = DumpSetTracker(settings(scope=scope))
    for now, _ in replay(tracker, history):
        present = tracker.present(now)
        deadline = tracker.deadline(now)
        if deadline is None:
            assert tracker.present(now + 1e9) == present
        else:
            between = now + fraction * (deadline - now)
            assert deadline > now
            assert between == deadline or tracker.present(between) == present
            assert tracker.present(deadline) != present
            assert tracker.deadline(deadline) is None


@given(HISTORIES, SCOPES, st.randoms(use_true_random=False))
def test_order_within_one_moment_does_not_matter(history: History, scope: Scope, rng: random.Random) -> None:
    """Files seen at the same time may come in any order, as a directory lists them."""
    shuffled = [(pause, rng.sample(files, len(files)), gone) for pause, files, gone in history]
    one, other = DumpSetTracker(settings(scope=scope)), DumpSetTracker(settings(scope=scope))
    for (now, _), _ in zip(replay(one, history), replay(other, shuffled), strict=True):
        assert one.present(now) == other.present(now)
        assert one.serial == other.serial
        assert one.deadline(now) == other.deadline(now)


@given(DIRECTORIES, SCOPES, st.randoms(use_true_random=False))
def test_order_of_final_files_does_not_matter(files: list[Found], scope: Scope, rng: random.Random) -> None:
    """The verdict of `analyze` is the same in whatever order a directory lists its files."""
    expected = final_set(files, settings(scope=scope))
    assert final_set(rng.sample(files, len(files)), settings(scope=scope)) == expected
    assert not expected.partial
    assert covered(expected) == {file.rank for file, _ in files}


@given(DIRECTORIES)
def test_start_up_and_analyze_agree(files: list[Found]) -> None:
    """Once its grace is over, the set that a daemon finds at start-up is the one `analyze` takes."""
    tracker = DumpSetTracker(settings())
    tracker.found(files, now=1000.0, wall_ns=(BEGIN + 1_000_000) * SECOND)
    assert tracker.present(1000.0) == final_set(files, settings())
    assert tracker.deadline(1000.0) is None
    assert tracker.at_startup is bool(files)
    assert tracker.quiet_s(1000.0) == (math.inf if not files else pytest.approx(1_000_000, abs=90_000))
