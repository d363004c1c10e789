"""Incidents: a stable name for a hang, and when it begins and ends. Pure; the caller passes the time."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from hashlib import sha256

from fr_exporter.diagnosis import Cause, Diagnosis, rfc3339
from fr_exporter.model import Scope


@dataclass(frozen=True, slots=True)
class Incident:
    """A hang, from the moment its dump set was final. Times in nanoseconds; `closed_at_ns` None: it is open.

    `since_ns` is when the stuck call was issued by its oldest waiter; `diagnosis` is the last one that says `hang`.
    """

    id: str
    training_job: str
    scope: Scope
    opened_at_ns: int
    since_ns: int | None
    closed_at_ns: int | None
    diagnosis: Diagnosis


@dataclass(frozen=True, slots=True)
class IncidentUpdate:
    """What follows from one diagnosis.

    `diagnosis` is the one passed in, with its incident's ID; `incident` is the open one; `hang` is the value of
    `fr_hang`; `changed` are the incidents to record anew; `counted` is the cause to add to `fr_incidents_total`.
    """

    diagnosis: Diagnosis | None
    incident: Incident | None
    hang: bool
    changed: tuple[Incident, ...]
    counted: Cause | None


class IncidentLog:
    """Opens and closes the incidents of one target, one after another."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._last: Incident | None = None
        self._serial: int | None = None

    def update(
        self, diagnosis: Diagnosis | None, *, serial: int, at_startup: bool, age_s: float, now_ns: int
    ) -> IncidentUpdate:
        """Take in the diagnosis of the present set, None where its files are gone; again as time passes, for the end.

        `serial` and `at_startup` are the set's; `age_s` is how long ago its newest file was written.
        """
        before = self._last
        superseded = None
        counted = None
        current = diagnosis if age_s < self._ttl_s else None
        if current is None:
            self._last = before and _closed(before, now_ns)
        elif before is not None and serial == self._serial:
            self._last = _sharpened(before, current, now_ns)
        elif not current.partial and current.verdict != "hang":
            self._last = before and _closed(before, now_ns)
        elif not current.partial:
            self._serial = serial
            self._last = _opened(current, now_ns)
            if before is not None and before.id == self._last.id:
                self._last = _sharpened(before, current, now_ns)
            else:
                superseded = before and _closed(before, now_ns)
                counted = None if at_startup else current.cause
        is_open = self._last is not None and self._last.closed_at_ns is None
        incident = self._last if is_open else None
        if diagnosis is not None and incident is not None and serial == self._serial:
            diagnosis = replace(diagnosis, incident=incident.id)
        return IncidentUpdate(
            diagnosis=diagnosis,
            incident=incident,
            hang=incident is not None or (current is not None and current.verdict == "hang"),
            changed=tuple(one for one in (superseded, self._last) if one is not None and one != before),
            counted=counted,
        )


def incident_id(diagnosis: Diagnosis) -> str:
    """Return the name of a hang, such as `20250923T065505Z-1f0c3a`, from the contents of its dumps alone."""
    headline = diagnosis.hung_process_groups[0] if diagnosis.hung_process_groups else None
    what: list[object] = [diagnosis.training_job]
    if headline is not None:
        what += [headline.group.name, sorted(headline.group.ranks or ()), headline.seq_id]
    second = (rfc3339(_since(diagnosis)) or "1970-01-01T00:00:00Z")[:19].replace("-", "").replace(":", "")
    return f"{second}Z-{sha256(json.dumps(what).encode()).hexdigest()[:6]}"


def _since(diagnosis: Diagnosis) -> int | None:
    """Return when the headline call was issued by its oldest waiter, else when the oldest stuck call was."""
    if diagnosis.hung_process_groups and diagnosis.hung_process_groups[0].since_ns is not None:
        return diagnosis.hung_process_groups[0].since_ns
    fronts = (report.front for report in diagnosis.ranks if report.front is not None)
    return min((front.issued_ns for front in fronts if front.issued_ns is not None), default=None)


def _opened(diagnosis: Diagnosis, now_ns: int) -> Incident:
    name = incident_id(diagnosis)
    return Incident(
        id=name,
        training_job=diagnosis.training_job,
        scope=diagnosis.scope,
        opened_at_ns=now_ns,
        since_ns=_since(diagnosis),
        closed_at_ns=None,
        diagnosis=replace(diagnosis, incident=name),
    )


def _sharpened(incident: Incident, diagnosis: Diagnosis, now_ns: int) -> Incident:
    """Return the incident as a later diagnosis of the same hang has it; the ID and the beginning stay."""
    if diagnosis.verdict == "hang":
        return replace(incident, closed_at_ns=None, diagnosis=replace(diagnosis, incident=incident.id))
    if diagnosis.verdict == "healthy" and not diagnosis.partial:
        return _closed(incident, now_ns)
    return incident


def _closed(incident: Incident, now_ns: int) -> Incident:
    return incident if incident.closed_at_ns is not None else replace(incident, closed_at_ns=now_ns)
