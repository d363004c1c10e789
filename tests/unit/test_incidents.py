"""The name of an incident, and when it begins and ends."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fr_exporter.diagnosis import Cause, Diagnosis
from fr_exporter.incidents import IncidentLog, IncidentUpdate, incident_id
from fr_exporter.model import ProcessGroup
from tests.unit.diagnosis_values import ANALYSED, EXPERT, SECOND, SINCE, device_stall, diagnosis, hung, report

TTL_S = 3600.0
HANG = device_stall()
HEALTHY = diagnosis()
INCONCLUSIVE = diagnosis(verdict="inconclusive")


def partial(found: Diagnosis) -> Diagnosis:
    """Return a diagnosis as it is while ranks may still be writing."""
    return replace(found, partial=True)


def with_headline(seq_id: int, since_ns: int | None = SINCE) -> Diagnosis:
    """Return the hang with another headline call."""
    return replace(HANG, hung_process_groups=(hung(seq_id=seq_id, since_ns=since_ns),))


class Steps:
    """An incident log that is told of one diagnosis a second."""

    def __init__(self) -> None:
        self.log = IncidentLog(TTL_S)
        self.now_ns = ANALYSED

    def update(
        self, found: Diagnosis | None, serial: int, *, at_startup: bool = False, age_s: float = 1.0
    ) -> IncidentUpdate:
        """Take in a diagnosis of the set with this serial."""
        self.now_ns += SECOND
        return self.log.update(found, serial=serial, at_startup=at_startup, age_s=age_s, now_ns=self.now_ns)


# The ID


def test_id_is_the_second_of_the_headline_and_a_hash() -> None:
    """1758610505 s since the epoch is 06:55:05 on 23 September 2025, UTC."""
    assert re.fullmatch(r"20250923T065505Z-[0-9a-f]{6}", incident_id(HANG))


def test_id_comes_from_contents_only() -> None:
    """Two exporters see other paths, times of analysis, mtimes and orders of members, and name the incident alike."""
    elsewhere = replace(
        HANG,
        source="/mnt/dumps",
        scope="node",
        summary="another",
        generated_at_ns=ANALYSED + 99 * SECOND,
        first_dump_time_ns=1,
        last_dump_time_ns=None,
        suspects=(),
        hung_process_groups=(hung(ProcessGroup.of("74", "another", (15, 14, 13, 12))),),
    )
    assert incident_id(elsewhere) == incident_id(HANG)


@pytest.mark.parametrize(
    "other",
    [
        replace(HANG, training_job="another"),
        replace(HANG, hung_process_groups=(hung(ProcessGroup.of("75", "", EXPERT.ranks)),)),
        replace(
            HANG,
            hung_process_groups=(
                hung(
                    ProcessGroup.of("74", "", (12, 13)),
                ),
            ),
        ),
        with_headline(20538),
        with_headline(20537, SINCE + SECOND),
    ],
    ids=["training job", "group name", "members", "sequence ID", "second"],
)
def test_another_call_or_job_has_another_id(other: Diagnosis) -> None:
    """The job, the group's name and members, the sequence ID and the second all count."""
    assert incident_id(other) != incident_id(HANG)


def test_id_without_an_issue_time() -> None:
    """Where the headline's is unknown the oldest stuck call tells it, else the epoch; never the clock or an mtime."""
    unknown = with_headline(20537, None)
    assert incident_id(unknown).startswith("20250923T065505Z-")
    for nothing in (replace(unknown, ranks=()), with_headline(20537, 10**30), replace(HEALTHY, verdict="hang")):
        assert incident_id(nothing).startswith("19700101T000000Z-")


# The beginning


def test_hang_opens_an_incident_once_the_set_is_final() -> None:
    """While the set is partial the hang shows without an ID; it is counted when it gets one, and once."""
    steps = Steps()
    early = steps.update(partial(HANG), 1)
    assert (early.hang, early.incident, early.changed, early.counted) == (True, None, (), None)
    assert early.diagnosis is not None
    assert early.diagnosis.incident is None
    opened = steps.update(HANG, 1)
    assert opened.incident is not None
    assert opened.diagnosis == opened.incident.diagnosis == replace(HANG, incident=incident_id(HANG))
    assert opened.changed == (opened.incident,)
    assert (opened.hang, opened.counted) == (True, Cause.DEVICE_STALL)
    assert (opened.incident.opened_at_ns, opened.incident.since_ns) == (steps.now_ns, SINCE)
    assert opened.incident.closed_at_ns is None
    again = steps.update(HANG, 1)
    assert (again.incident, again.changed, again.counted) == (opened.incident, (), None)


@pytest.mark.parametrize("found", [HEALTHY, INCONCLUSIVE, partial(HEALTHY), None])
def test_without_a_hang_there_is_no_incident(found: Diagnosis | None) -> None:
    """Only the verdict `hang` opens one."""
    update = Steps().update(found, 1)
    assert update == IncidentUpdate(diagnosis=found, incident=None, hang=False, changed=(), counted=None)


def test_later_files_sharpen_the_incident_and_never_rename_it() -> None:
    """A late file may bring another headline, or make the set wait again: the ID stays, the diagnosis changes."""
    steps = Steps()
    first = steps.update(HANG, 1).incident
    assert first is not None
    for later in (with_headline(20100), partial(with_headline(20000))):
        update = steps.update(later, 1)
        assert update.incident == replace(first, diagnosis=replace(later, incident=first.id))
        assert update.changed == (update.incident,)
        assert update.diagnosis == replace(later, incident=first.id)
        assert update.counted is None


def test_final_set_that_becomes_a_hang_opens_an_incident() -> None:
    """A file that lands after the grace may turn `inconclusive` into a hang."""
    steps = Steps()
    steps.update(INCONCLUSIVE, 1)
    assert steps.update(HANG, 1).counted == Cause.DEVICE_STALL


def test_set_found_at_start_up_has_the_same_id_and_does_not_count() -> None:
    """A restart in the middle of an incident finds it again and pages no second time."""
    before, after = Steps().update(HANG, 1), Steps().update(HANG, 7, at_startup=True)
    assert before.incident is not None
    assert after.incident is not None
    assert after.incident.id == before.incident.id
    assert after.hang
    assert after.counted is None


def test_yesterdays_dumps_never_page() -> None:
    """A set older than the time to live opens no incident, whatever its verdict."""
    update = Steps().update(HANG, 1, at_startup=True, age_s=TTL_S)
    assert update == IncidentUpdate(diagnosis=HANG, incident=None, hang=False, changed=(), counted=None)
    assert not Steps().update(partial(HANG), 1, at_startup=True, age_s=TTL_S).hang


# The end


@pytest.mark.parametrize(
    ("found", "serial", "age_s"),
    [(HEALTHY, 2, 1.0), (INCONCLUSIVE, 2, 1.0), (None, 1, 1.0), (HANG, 1, TTL_S), (HEALTHY, 1, 1.0)],
    ids=["newer healthy set", "newer inconclusive set", "files gone", "too old", "late files show it healthy"],
)
def test_what_ends_an_incident(found: Diagnosis | None, serial: int, age_s: float) -> None:
    """It ends once, and what the set said last stays in it."""
    steps = Steps()
    opened = steps.update(HANG, 1).incident
    assert opened is not None
    ended = steps.update(found, serial, age_s=age_s)
    assert ended.changed == (replace(opened, closed_at_ns=steps.now_ns),)
    assert ended == IncidentUpdate(diagnosis=found, incident=None, hang=False, changed=ended.changed, counted=None)
    assert steps.update(found, serial, age_s=age_s).changed == ()


@pytest.mark.parametrize(
    ("found", "serial"), [(partial(HEALTHY), 2), (partial(HANG), 2), (INCONCLUSIVE, 1), (partial(HEALTHY), 1)]
)
def test_what_does_not_end_an_incident(found: Diagnosis, serial: int) -> None:
    """A newer set is nothing certain while partial, and a set that has become unclear still had its hang."""
    steps = Steps()
    opened = steps.update(HANG, 1).incident
    update = steps.update(found, serial)
    assert (update.incident, update.hang, update.changed) == (opened, True, ())
    assert update.diagnosis is not None
    assert opened is not None
    assert update.diagnosis.incident == (opened.id if serial == 1 else None)


def test_next_hang_takes_the_place_of_the_last() -> None:
    """The old incident is closed and the new one opened in one step, and counted."""
    steps = Steps()
    first = steps.update(HANG, 1).incident
    assert first is not None
    following = replace(with_headline(1, SINCE + 900 * SECOND), cause=Cause.HOST_STALL)
    update = steps.update(following, 2)
    assert update.incident is not None
    assert update.changed == (replace(first, closed_at_ns=steps.now_ns), update.incident)
    assert update.incident.id == incident_id(following)
    assert update.counted == Cause.HOST_STALL


def test_the_same_hang_dumped_again_is_the_same_incident() -> None:
    """Asked again half an hour later the ranks stand where they stood: another set, but nothing new, open or closed."""
    steps = Steps()
    first = steps.update(HANG, 1).incident
    assert first is not None
    again = steps.update(HANG, 2)
    assert (again.incident, again.changed, again.counted) == (first, (), None)
    steps.update(None, 2)
    reopened = steps.update(HANG, 3)
    assert (reopened.incident, reopened.counted) == (first, None)


def test_hang_that_late_files_took_back_and_gave_again() -> None:
    """Within one set the incident comes back under its first name."""
    steps = Steps()
    first = steps.update(HANG, 1).incident
    assert first is not None
    steps.update(HEALTHY, 1)
    back = steps.update(with_headline(20000), 1)
    assert back.incident is not None
    assert (back.incident.id, back.incident.closed_at_ns, back.counted) == (first.id, None, None)


def test_a_rank_stuck_longer_than_the_headline_does_not_date_the_incident() -> None:
    """Only where the headline call has no issue time do other calls count."""
    older = report(3, stuck_in=EXPERT)
    assert older.front is not None
    older = replace(older, front=replace(older.front, issued_ns=SINCE - 60 * SECOND))
    assert incident_id(replace(HANG, ranks=(older,))).startswith("20250923T065505Z-")
    assert incident_id(replace(with_headline(1, None), ranks=(older,))).startswith("20250923T065405Z-")
