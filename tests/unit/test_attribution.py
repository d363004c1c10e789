"""The library interface: `analyze_dumps` and `CollectiveAnalyzer`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

import fr_exporter
from fr_exporter import AttributionState, CollectiveAnalyzer, analyze_dumps
from fr_exporter.errors import UsageError
from tests.builders import Job


@pytest.fixture
def stalled(tmp_path: Path) -> Path:
    """Write the dumps of four ranks of which rank 2 never issues the second all_reduce."""
    job = Job(world_size=4)
    group = job.group("7", "EXPERT_MODEL_PARALLEL_GROUP", [0, 1, 2, 3])
    job.collective(group, sizes=[[8, 2]])
    job.collective(group, sizes=[[8, 2]], by=group.without(2))
    job.write(tmp_path)
    return tmp_path


def test_the_package_exports_its_interface() -> None:
    """The façade holds the documented names and no others."""
    assert sorted(fr_exporter.__all__) == [
        "AttributionState",
        "CollectiveAnalyzer",
        "Diagnosis",
        "FRAnalysisResult",
        "__version__",
        "analyze_dumps",
    ]
    assert all(hasattr(fr_exporter, name) for name in fr_exporter.__all__)


def test_the_analyzer_gives_a_table_and_the_hanging_ranks(stalled: Path) -> None:
    """Three ranks wait for rank 2: the table has their group, and a restart without rank 2 can help."""
    result, state = CollectiveAnalyzer({"fr_path": str(stalled)}).run_sync({})
    assert result.hanging_ranks == "hanging ranks: [2]"
    assert [[cell.strip() for cell in line.split(" | ")] for line in result.analysis_text.splitlines()] == [
        ["PGID", "Process Group Desc", "Op Type", "Size", "Dtype", "Missing Ranks"],
        ["7", "EXPERT_MODEL_PARALLEL_GROUP", "nccl:all_reduce", "[8, 2]", "Float", "2"],
    ]
    assert state is AttributionState.CONTINUE
    assert result.diagnosis.suspect_ranks == [2]


def test_options_of_the_call_win(stalled: Path) -> None:
    """What `run_sync` is given replaces what the analyzer was made with."""
    analyzer = CollectiveAnalyzer({"fr_path": "/nowhere", "pattern": "nothing_*", "verbose": True})
    result, _ = analyzer.run_sync({"fr_path": stalled, "pattern": "_dump_*", "health_check": True})
    assert result.hanging_ranks == "hanging ranks: [2]"
    assert "\n\nRanks\n" in result.analysis_text
    assert "\n\nHealth checks\n" in result.analysis_text


def test_the_coroutine_gives_the_same(stalled: Path) -> None:
    """`run` is `run_sync` for an event loop, apart from the time at which it was asked."""
    analyzer = CollectiveAnalyzer({"fr_path": str(stalled)})
    result, state = asyncio.run(analyzer.run({}))
    expected, expected_state = analyzer.run_sync({})
    assert replace(result.diagnosis, generated_at_ns=0) == replace(expected.diagnosis, generated_at_ns=0)
    assert (result.analysis_text, state) == (expected.analysis_text, expected_state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fr_path": ".", "patern": "x"}, "unknown option 'patern': known are fr_path, pattern, verbose, health_check"),
        ({}, "fr_path must say where the dumps are: a directory, a file or a path prefix"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    """A misspelt option must not pass for a default."""
    with pytest.raises(UsageError) as raised:
        CollectiveAnalyzer(options).run_sync({})
    assert str(raised.value) == message


def test_wrong_arguments_are_refused_before_anything_is_read(stalled: Path) -> None:
    """A scope that does not exist and a world without ranks are errors, not silent defaults."""
    with pytest.raises(UsageError, match="scope must be one of job, node, not 'nodes'"):
        analyze_dumps(stalled, scope="nodes")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="world size must be at least 1, not 0"):
        analyze_dumps(stalled, world_size=0)


def test_a_larger_world_has_missing_ranks(stalled: Path) -> None:
    """With six ranks expected the two that left no dump are named."""
    diagnosis = analyze_dumps(stalled, world_size=6)
    assert diagnosis.missing_ranks == (4, 5)
    assert diagnosis.suspect_ranks == [2]
