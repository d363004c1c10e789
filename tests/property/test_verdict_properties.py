"""What holds of the verdict for every job, whatever it does."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fr_exporter import Diagnosis
from fr_exporter.diagnosis import Cause
from tests.builders import SECOND, START_NS, Dump, write
from tests.property.strategies import Program, dumps_at, programs, run, scrambled_dumps, stalled_programs
from tests.verdicts import causes, diagnose

Scrambled = tuple[Program, dict[int, int], frozenset[tuple[int, int]]]


@pytest.fixture(scope="module")
def directory() -> Any:
    """Return one directory for all examples, so that paths never differ between two diagnoses."""
    with TemporaryDirectory() as path:
        yield Path(path)


def diagnose_dumps(directory: Path, dumps: Mapping[int, Dump], mtime_ns: Mapping[int, int]) -> Diagnosis:
    """Diagnose these dumps and no others, as at one moment."""
    for path in directory.iterdir():
        path.unlink()
    return replace(diagnose(write(directory, dumps, mtime_ns=mtime_ns)), generated_at_ns=0)


def shuffled(value: Any, rng: random.Random) -> Any:
    """Return the same data with every dict in another order."""
    if isinstance(value, dict):
        return {key: shuffled(value[key], rng) for key in rng.sample(list(value), len(value))}
    return [shuffled(item, rng) for item in value] if isinstance(value, list) else value


@given(scrambled=scrambled_dumps(), seed=st.integers(0, 1 << 16))
def test_order_of_files_and_keys_changes_nothing(directory: Path, scrambled: Scrambled, seed: int) -> None:
    """The same dumps, written in another order and with their dicts in another order, give an equal diagnosis."""
    program, moments, flipped = scrambled
    rng = random.Random(seed)  # noqa: S311
    dumps = dumps_at(program, moments, flipped=flipped)
    reordered = {rank: shuffled(dumps[rank], rng) for rank in rng.sample(list(dumps), len(dumps))}

    assert diagnose_dumps(directory, reordered, moments) == diagnose_dumps(directory, dumps, moments)


@given(scrambled=scrambled_dumps(), data=st.data())
def test_names_of_ranks_do_not_matter(directory: Path, scrambled: Scrambled, data: st.DataObject) -> None:
    """With the ranks renumbered the verdict stays, and the suspects are the same ranks under their new numbers."""
    program, moments, flipped = scrambled
    names = data.draw(st.permutations(range(program.world_size)))
    renamed = frozenset((index, names[rank]) for index, rank in flipped)

    before = diagnose_dumps(directory, dumps_at(program, moments, flipped=flipped), moments)
    after = diagnose_dumps(directory, dumps_at(program.relabelled(names), moments, flipped=renamed), moments)

    assert after.verdict == before.verdict
    assert causes(after) == {names[rank]: cause for rank, cause in causes(before).items()}


@given(scrambled=scrambled_dumps(), data=st.data())
def test_any_file_may_be_absent(directory: Path, scrambled: Scrambled, data: st.DataObject) -> None:
    """Whichever files are left, there is a diagnosis, and it tells the absent ranks from the present."""
    program, moments, flipped = scrambled
    left = data.draw(st.sets(st.sampled_from(range(program.world_size)), min_size=1))
    dumps = dumps_at(program, moments, flipped=flipped)

    diagnosis = diagnose_dumps(directory, {rank: dumps[rank] for rank in left}, moments)

    assert diagnosis.dumped_ranks == tuple(sorted(left))
    assert set(diagnosis.missing_ranks).isdisjoint(left)
    assert {rank for rank, cause in causes(diagnosis).items() if cause == Cause.MISSING_DUMP}.isdisjoint(left)


@settings(max_examples=200)
@given(program=programs(), data=st.data())
def test_running_job_is_never_a_hang(directory: Path, program: Program, data: st.DataObject) -> None:
    """A job asked while it runs, each rank up to a second after the one before, has young calls and no suspects."""
    asked_ns = data.draw(st.integers(START_NS, run(program).end_ns))
    skews = data.draw(st.lists(st.integers(0, SECOND), min_size=program.world_size, max_size=program.world_size))
    moments = {rank: asked_ns + skew for rank, skew in enumerate(skews)}

    diagnosis = diagnose_dumps(directory, dumps_at(program, moments), moments)

    assert (diagnosis.verdict, diagnosis.suspect_ranks) == ("healthy", [])


@settings(max_examples=200)
@given(stalled=stalled_programs())
def test_host_that_stops_is_the_only_suspect(directory: Path, stalled: tuple[Program, int]) -> None:
    """Whoever else is stuck, near or far, the stopped rank alone makes them wait; if nobody is stuck, all is well."""
    program, rank = stalled
    dumped_ns = run(program).end_ns + 60 * SECOND
    moments = dict.fromkeys(range(program.world_size), dumped_ns)

    diagnosis = diagnose_dumps(directory, dumps_at(program, moments), moments)

    timeline = run(program)
    stuck = any(issued and done > dumped_ns for issued, done in zip(timeline.issued, timeline.completed, strict=True))
    assert diagnosis.verdict == ("hang" if stuck else "healthy")
    assert diagnosis.suspect_ranks == ([rank] if stuck else [])
