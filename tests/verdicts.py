"""Ask for a diagnosis, and state what it must say."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fr_exporter import Diagnosis, analyze_dumps
from fr_exporter.diagnosis import AttributionState, Cause
from tests.builders import Group

RESTART_MEETS_IT_AGAIN = {
    Cause.COLLECTIVE_MISMATCH,
    Cause.ORDER_DEADLOCK,
    Cause.P2P_UNMATCHED,
    Cause.DESYNC,
}


def diagnose(directory: Path, **options: Any) -> Diagnosis:
    """Analyse the dumps of a directory."""
    return analyze_dumps(str(directory), **options)


def assert_hang(
    diagnosis: Diagnosis,
    cause: Cause,
    suspects: Iterable[int],
    *,
    group: Group | None = None,
    seq_id: int | None = None,
) -> None:
    """Assert the verdict, its cause and suspects, and where given the headline group and the call in it."""
    assert diagnosis.verdict == "hang", diagnosis.summary
    assert (diagnosis.cause, diagnosis.suspect_ranks) == (cause, sorted(suspects)), diagnosis.summary
    stop = cause in RESTART_MEETS_IT_AGAIN
    assert diagnosis.attribution_state == (AttributionState.STOP if stop else AttributionState.CONTINUE)
    headline = diagnosis.hung_process_groups[0]
    assert headline.cause == cause
    if group is not None:
        assert (headline.group.name, headline.group.desc) == (group.name, group.desc)
        assert headline.group.ranks == group.ranks
    if seq_id is not None:
        assert headline.seq_id == seq_id


def assert_healthy(diagnosis: Diagnosis) -> None:
    """Assert that nobody is stuck and nobody suspected."""
    assert (diagnosis.verdict, diagnosis.suspect_ranks) == ("healthy", []), diagnosis.summary
    assert (diagnosis.cause, diagnosis.hung_process_groups, diagnosis.mismatches) == (None, (), ())
    assert diagnosis.attribution_state == AttributionState.CONTINUE


def causes(diagnosis: Diagnosis) -> dict[int, Cause]:
    """Return each suspect's cause."""
    return {suspect.rank: suspect.cause for suspect in diagnosis.suspects}
