"""The answer: what hung, and who made the others wait. Frozen values, and their JSON form.

Lists of ranks are sorted. Times are nanoseconds since the epoch here and RFC 3339 UTC in `Diagnosis.to_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from typing import Any, Literal

from fr_exporter.model import Frame, Kind, ProcessGroup, Scope, UnreadableFile

SCHEMA_VERSION = 1

Verdict = Literal["hang", "healthy", "inconclusive"]
Confidence = Literal["high", "medium", "low"]
MismatchKind = Literal["operation", "size", "dtype"]


class Cause(str, Enum):
    """Why the suspects made the others wait; docs/diagnosis.md describes each."""

    COLLECTIVE_MISMATCH = "collective_mismatch"
    HOST_STALL = "host_stall"
    DEVICE_STALL = "device_stall"
    DESYNC = "desync"
    COMMUNICATION_FAULT = "communication_fault"
    ORDER_DEADLOCK = "order_deadlock"
    P2P_UNMATCHED = "p2p_unmatched"
    MISSING_DUMP = "missing_dump"


class AttributionState(str, Enum):
    """Whether a restart can help: STOP, it would meet the same fault; CONTINUE, it can once suspects are isolated."""

    STOP = "STOP"
    CONTINUE = "CONTINUE"


@dataclass(frozen=True, slots=True)
class Call:
    """One call as a reader wants to see it."""

    operation: str | None
    group: ProcessGroup
    kind: Kind
    collective_seq_id: int | None
    p2p_seq_id: int | None
    state: str | None
    issued_ns: int | None
    frames: tuple[Frame, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the object `last_call` and `front` of the JSON form."""
        return {
            "operation": self.operation,
            "process_group": self.group.name,
            "desc": self.group.desc,
            "kind": self.kind,
            "collective_seq_id": self.collective_seq_id,
            "p2p_seq_id": self.p2p_seq_id,
            "state": self.state,
            "issued": rfc3339(self.issued_ns),
            "issued_ns": self.issued_ns,
            "frames": _frames(self.frames),
        }


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that made others wait, and the evidence: what it did, with the numbers, as a predicate without its rank.

    Suspects of one finding so share their evidence.
    """

    rank: int
    node: str | None
    cause: Cause
    confidence: Confidence
    evidence: str
    waiting_ranks: tuple[int, ...]
    last_call: Call | None
    health: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return one element of `suspects`."""
        return {
            "rank": self.rank,
            "node": self.node,
            "cause": self.cause.value,
            "confidence": self.confidence,
            "evidence": f"Rank {self.rank} {self.evidence}.",
            "waiting_ranks": list(self.waiting_ranks),
            "last_call": None if self.last_call is None else self.last_call.to_dict(),
            "health": dict(self.health),
        }


@dataclass(frozen=True, slots=True)
class HungGroup:
    """A process group in whose call ranks wait directly on a suspect. `since_ns`: issued by its oldest waiter."""

    group: ProcessGroup
    cause: Cause
    operation: str | None
    kind: Kind
    collective_seq_id: int | None
    p2p_seq_id: int | None
    input_sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    waiting_ranks: tuple[int, ...]
    waiting_on: tuple[int, ...]
    since_ns: int | None
    frames: tuple[Frame, ...]

    @property
    def seq_id(self) -> int | None:
        """The sequence ID of the stuck call, of the kind that `kind` names."""
        return self.p2p_seq_id if self.kind == "p2p" else self.collective_seq_id

    def to_dict(self) -> dict[str, Any]:
        """Return one element of `hung_process_groups`."""
        return {
            "process_group": self.group.name,
            "desc": self.group.desc,
            "ranks": None if self.group.ranks is None else sorted(self.group.ranks),
            "cause": self.cause.value,
            "operation": self.operation,
            "kind": self.kind,
            "collective_seq_id": self.collective_seq_id,
            "p2p_seq_id": self.p2p_seq_id,
            "input_sizes": [list(shape) for shape in self.input_sizes],
            "dtypes": list(self.dtypes),
            "waiting_ranks": list(self.waiting_ranks),
            "waiting_on": list(self.waiting_on),
            "since": rfc3339(self.since_ns),
            "since_ns": self.since_ns,
            "frames": _frames(self.frames),
        }


@dataclass(frozen=True, slots=True)
class Camp:
    """The ranks that issued a call in one and the same way; `value` is what they issued, as text."""

    value: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An open collective that is not the same on all ranks. The largest camp stands first."""

    group: ProcessGroup
    collective_seq_id: int
    kind: MismatchKind
    camps: tuple[Camp, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return one element of `mismatches`."""
        return {
            "process_group": self.group.name,
            "desc": self.group.desc,
            "collective_seq_id": self.collective_seq_id,
            "kind": self.kind,
            "camps": [{"value": camp.value, "ranks": list(camp.ranks)} for camp in self.camps],
        }


@dataclass(frozen=True, slots=True)
class RankProgress:
    """How far one rank got in one group. `kind` says what the counters count; None where the dump does not tell."""

    group: ProcessGroup
    kind: Kind
    last_enqueued: int | None
    last_started: int | None
    last_completed: int | None
    open_operations: int

    def to_dict(self) -> dict[str, Any]:
        """Return one element of `progress`."""
        return {
            "process_group": self.group.name,
            "desc": self.group.desc,
            "kind": self.kind,
            "last_enqueued": self.last_enqueued,
            "last_started": self.last_started,
            "last_completed": self.last_completed,
            "open_operations": self.open_operations,
        }


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank's state: the call it is stuck in (None: it is not stuck) and its progress in each group."""

    rank: int
    node: str | None
    dump_time_ns: int | None
    front: Call | None
    progress: tuple[RankProgress, ...]
    health: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return one element of `ranks`."""
        return {
            "rank": self.rank,
            "node": self.node,
            "dump_time": rfc3339(self.dump_time_ns),
            "dump_time_ns": self.dump_time_ns,
            "front": None if self.front is None else self.front.to_dict(),
            "progress": [entry.to_dict() for entry in self.progress],
            "health": dict(self.health),
        }


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The verdict over one dump set.

    `cause` is that of the headline, `hung_process_groups[0]`; None without a hang. `incident` is the stable id, set by
    the daemon once the set is final.
    """

    training_job: str
    source: str
    scope: Scope
    verdict: Verdict
    partial: bool
    summary: str
    cause: Cause | None
    attribution_state: AttributionState
    hung_process_groups: tuple[HungGroup, ...]
    suspects: tuple[Suspect, ...]
    mismatches: tuple[Mismatch, ...]
    world_size: int
    expected_ranks: int
    dumped_ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    pending_ranks: tuple[int, ...]
    stale_ranks: tuple[int, ...]
    remote_ranks: tuple[int, ...]
    unreadable_files: tuple[UnreadableFile, ...]
    warnings: tuple[str, ...]
    ranks: tuple[RankReport, ...]
    dump_versions: tuple[str, ...]
    comm_lib_versions: tuple[str, ...]
    generated_at_ns: int
    first_dump_time_ns: int | None
    last_dump_time_ns: int | None
    incident: str | None = None

    @property
    def suspect_ranks(self) -> list[int]:
        """The suspects' global ranks, sorted."""
        return sorted({suspect.rank for suspect in self.suspects})

    @property
    def waiting_ranks(self) -> list[int]:
        """The ranks with a dump that are stuck in a call, sorted."""
        return [report.rank for report in self.ranks if report.front is not None]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the command line and `/api/v1/diagnosis`; every key present, unknown is None."""
        return {
            "schema_version": SCHEMA_VERSION,
            "training_job": self.training_job,
            "incident": self.incident,
            "verdict": self.verdict,
            "partial": self.partial,
            "scope": self.scope,
            "source": self.source,
            "generated_at": rfc3339(self.generated_at_ns),
            "generated_at_ns": self.generated_at_ns,
            "first_dump_time": rfc3339(self.first_dump_time_ns),
            "first_dump_time_ns": self.first_dump_time_ns,
            "last_dump_time": rfc3339(self.last_dump_time_ns),
            "last_dump_time_ns": self.last_dump_time_ns,
            "cause": None if self.cause is None else self.cause.value,
            "attribution_state": self.attribution_state.value,
            "summary": self.summary,
            "hung_process_groups": [group.to_dict() for group in self.hung_process_groups],
            "suspect_ranks": self.suspect_ranks,
            "suspects": [suspect.to_dict() for suspect in self.suspects],
            "mismatches": [mismatch.to_dict() for mismatch in self.mismatches],
            "world_size": self.world_size,
            "dumped_ranks": list(self.dumped_ranks),
            "missing_ranks": list(self.missing_ranks),
            "pending_ranks": list(self.pending_ranks),
            "stale_ranks": list(self.stale_ranks),
            "remote_ranks": list(self.remote_ranks),
            "unreadable_files": [{"file": entry.file, "error": entry.error} for entry in self.unreadable_files],
            "warnings": list(self.warnings),
            "ranks": [report.to_dict() for report in self.ranks],
            "versions": {"dump": list(self.dump_versions), "comm_lib": list(self.comm_lib_versions)},
        }


def rfc3339(time_ns: int | None) -> str | None:
    """Return a time as RFC 3339 UTC with microseconds, or None for an unknown or impossible one."""
    if time_ns is None:
        return None
    try:
        moment = datetime.fromtimestamp(time_ns // 1_000_000_000, tz=timezone.utc)
    except (OverflowError, OSError, ValueError):
        return None
    exact = moment.replace(microsecond=time_ns // 1000 % 1_000_000)
    return exact.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _frames(frames: tuple[Frame, ...]) -> list[dict[str, Any]]:
    return [{"name": frame.name, "filename": frame.filename, "line": frame.line} for frame in frames]
