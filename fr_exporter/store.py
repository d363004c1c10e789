"""What a scrape reads: the latest state of each target and the last incidents, behind one lock."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

from fr_exporter.diagnosis import Diagnosis
from fr_exporter.incidents import Incident
from fr_exporter.model import Scope


@dataclass(frozen=True, slots=True)
class TargetState:
    """What is known of one target. `diagnosis` None: no dumps yet. `incident` is the open one, if any.

    `hang` is the value of `fr_hang`: it precedes the incident while the set is partial. It is None before the files
    were first seen: who restarts in the middle of an incident must not say that there is none.
    """

    training_job: str
    scope: Scope
    path: str
    watch_up: bool
    backend: str
    diagnosis: Diagnosis | None
    hang: bool | None
    incident: Incident | None
    last_analysis_ns: int | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at one moment: the targets sorted by their key, the incidents with the newest first."""

    targets: tuple[TargetState, ...]
    incidents: tuple[Incident, ...]


class Store:
    """Keeps the latest state of each target, and the last `history` incidents of all of them."""

    def __init__(self, history: int) -> None:
        self._history = history
        self._lock = Lock()
        self._targets: dict[str, TargetState] = {}
        self._incidents: list[Incident] = []

    def update(self, key: str, state: TargetState) -> None:
        """Put a target's new state in place of its last one."""
        with self._lock:
            self._targets[key] = state

    def forget(self, key: str) -> None:
        """Drop a target; its incidents stay in the history."""
        with self._lock:
            self._targets.pop(key, None)

    def record(self, incident: Incident) -> None:
        """Add an incident, or put it in place of what was recorded under its ID."""
        with self._lock:
            others = [known for known in self._incidents if known.id != incident.id]
            newest_first = sorted([incident, *others], key=lambda known: known.opened_at_ns, reverse=True)
            self._incidents = newest_first[: self._history]

    def snapshot(self) -> Snapshot:
        """Return a consistent copy."""
        with self._lock:
            return Snapshot(tuple(self._targets[key] for key in sorted(self._targets)), tuple(self._incidents))
