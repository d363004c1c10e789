"""Dumps that torch's own recorder wrote in a job with a real fault: the verdict must say what was done to the job."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders import SECOND
from tests.torch.scenarios import FORMS, HANGS, HEALTHY, PREFIX, UNDECIDED, WORLD_SIZE, Scenario
from tests.verdicts import assert_hang, assert_healthy, causes, diagnose

pytestmark = [pytest.mark.torch, pytest.mark.parametrize("form", FORMS)]

PATTERN = f"{PREFIX}*"

Incident = tuple[Scenario, Path]


@pytest.fixture(scope="module")
def incident(
    request: pytest.FixtureRequest,
    run_job: Callable[[Scenario, Path], None],
    tmp_path_factory: pytest.TempPathFactory,
) -> Incident:
    """Run a scenario; return it, and the directory that has its dumps in each form."""
    scenario: Scenario = request.param
    directory = tmp_path_factory.mktemp(scenario.name)
    run_job(scenario, directory)
    if not scenario.running:
        # Nobody waits here until a watchdog gives up; that is when a job that hangs would have dumped.
        for file in directory.glob(f"*/{PATTERN}"):
            moment = file.stat().st_mtime_ns + 60 * SECOND
            os.utime(file, ns=(moment, moment))
    return scenario, directory


def scenarios(among: list[Scenario]) -> pytest.MarkDecorator:
    """Run a test on the dumps of each of these scenarios."""
    return pytest.mark.parametrize("incident", among, indirect=True, ids=[scenario.name for scenario in among])


@scenarios(HANGS)
def test_hang(incident: Incident, form: str) -> None:
    """The suspects, the cause and the hung call are those of the fault, and who did not dump is missing."""
    scenario, directory = incident
    diagnosis = diagnose(directory / form, pattern=PATTERN)

    assert scenario.cause is not None
    assert_hang(diagnosis, scenario.cause, scenario.suspects)
    assert set(causes(diagnosis).values()) == {scenario.cause}
    headline = diagnosis.hung_process_groups[0]
    right = [(hung.group, hung.ranks, hung.seq_id) for hung in scenario.hung]
    assert (headline.group.desc, headline.group.ranks, headline.collective_seq_id) in right
    assert set(diagnosis.missing_ranks) == {*scenario.frozen, *scenario.raised}
    assert diagnosis.world_size == WORLD_SIZE


@scenarios(HEALTHY)
def test_healthy(incident: Incident, form: str) -> None:
    """Nobody is stuck in a finished job, nor in a running one whose ranks are asked for dumps one after another."""
    assert_healthy(diagnose(incident[1] / form, pattern=PATTERN))


@scenarios(UNDECIDED)
def test_members_not_listed(incident: Incident, form: str) -> None:
    """Dumps that list no members do not tell who waits for whom, and nobody is accused."""
    diagnosis = diagnose(incident[1] / form, pattern=PATTERN)

    assert (diagnosis.verdict, diagnosis.suspect_ranks) == ("inconclusive", []), diagnosis.summary
