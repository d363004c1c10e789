"""The JSON API: what the store holds, as it holds it."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fr_exporter.diagnosis import rfc3339
from fr_exporter.incidents import Incident
from fr_exporter.store import Snapshot
from fr_exporter.web.http import Response, as_json, error


def diagnosis(snapshot: Snapshot, training_job: str | None) -> Response:
    """Return the diagnosis of one job; the name may be left out where there is one job."""
    # A directory of jobs that cannot be listed has a state, and no name.
    targets = [target for target in snapshot.targets if target.training_job]
    jobs = [target.training_job for target in targets]
    if not jobs:
        return error("no training job is watched", HTTPStatus.NOT_FOUND)
    if training_job is None and len(jobs) > 1:
        return error("say which: ?training_job=<name>", HTTPStatus.BAD_REQUEST, training_jobs=jobs)
    for target in targets:
        if training_job in (None, target.training_job):
            if target.diagnosis is None:
                return error(f"no dumps of {target.training_job} yet: watching {target.path}", HTTPStatus.NOT_FOUND)
            return as_json(target.diagnosis.to_dict())
    return error(f"no such training job: {training_job}", HTTPStatus.NOT_FOUND, training_jobs=jobs)


def diagnoses(snapshot: Snapshot) -> Response:
    """Return the diagnoses of all jobs that have one, hangs first."""
    found = [target.diagnosis for target in snapshot.targets if target.diagnosis is not None]
    return as_json([entry.to_dict() for entry in sorted(found, key=lambda entry: entry.verdict != "hang")])


def incidents(snapshot: Snapshot) -> Response:
    """Return the incidents, the newest first, without their diagnoses."""
    return as_json([_summary(incident) for incident in snapshot.incidents])


def incident(snapshot: Snapshot, incident_id: str) -> Response:
    """Return one incident with its diagnosis."""
    for entry in snapshot.incidents:
        if entry.id == incident_id:
            return as_json({**_summary(entry), "diagnosis": entry.diagnosis.to_dict()})
    return error(f"no such incident: {incident_id}; only the last incidents.history are kept", HTTPStatus.NOT_FOUND)


def _summary(incident: Incident) -> dict[str, Any]:
    found = incident.diagnosis
    return {
        "incident": incident.id,
        "training_job": incident.training_job,
        "scope": incident.scope,
        "opened_at": rfc3339(incident.opened_at_ns),
        "opened_at_ns": incident.opened_at_ns,
        "since": rfc3339(incident.since_ns),
        "since_ns": incident.since_ns,
        "closed_at": rfc3339(incident.closed_at_ns),
        "closed_at_ns": incident.closed_at_ns,
        "cause": None if found.cause is None else found.cause.value,
        "attribution_state": found.attribution_state.value,
        "suspect_ranks": found.suspect_ranks,
        "summary": found.summary,
    }
