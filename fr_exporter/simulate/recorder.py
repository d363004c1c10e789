"""What the flight recorder of each rank would hold at the moment it dumps: dicts of version 2.10."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from fr_exporter.simulate.engine import RankRun, Record
from fr_exporter.simulate.layout import Group
from fr_exporter.simulate.program import SITES, Shape

TIMEOUT_NS = 600_000_000_000

# The watchdog looks at the calls in flight every so often, and takes note of what has happened since.
_WATCHDOG_NS = 100_000_000

_FRAMES = {
    site: [{"name": name, "filename": filename, "line": line} for name, filename, line in frames]
    for site, frames in SITES.items()
}

Dump = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recorder:
    """How the job's recorder is set: the size of its ring in entries, and what it writes down.

    `only_active` leaves completed calls out, `timing` notes when calls start, `frames` adds Python stacks.
    """

    ring: int = 2000
    only_active: bool = False
    timing: bool = False
    frames: bool = True

    def dump(self, run: RankRun, local_ids: Mapping[Group, int], moment_ns: int, epoch_ns: int) -> Dump:
        """Return what a rank dumps at a moment; both times in nanoseconds, the epoch's is that of the job's start.

        `local_ids` numbers the rank's groups in the order in which it made them.
        """
        view = _View(self, run, local_ids, moment_ns, epoch_ns)
        records = run.records[: bisect_right(run.records, moment_ns, key=attrgetter("issued_ns"))]
        of_group: dict[Group, list[Record]] = {}
        for record in records:
            of_group.setdefault(record.call.group, []).append(record)
        return {
            "version": "2.10",
            "pg_config": {
                group.name: {"name": group.name, "desc": group.desc, "ranks": group.ranks_text}
                for group in sorted(of_group, key=attrgetter("name"))
            },
            "comm_lib_version": "2.27.5",
            "pg_status": {
                str(local_ids[group]): view.status(of_group[group])
                for group in sorted(of_group, key=local_ids.__getitem__)
            },
            "entries": view.entries(records),
        }


class _View:
    """One rank's calls as seen at one moment."""

    def __init__(
        self, recorder: Recorder, run: RankRun, local_ids: Mapping[Group, int], moment_ns: int, epoch_ns: int
    ) -> None:
        self._recorder = recorder
        self._local_ids = local_ids
        self._seen_until_ns = min(moment_ns, run.lost_ns)
        self._epoch_ns = epoch_ns

    def status(self, records: Sequence[Record]) -> dict[str, int]:
        """Return the counters of one group, as its watchdog left them when it last looked."""
        started = -1
        if self._recorder.timing:
            started = max((_seq_id(record) for record in records if self._is_noted(record.started_ns)), default=-1)
        completed, looked_ns = -1, 0
        for record in records:
            if record.completed_ns is not None and looked_ns <= _noted_ns(record.completed_ns) <= self._seen_until_ns:
                completed, looked_ns = _seq_id(record), _noted_ns(record.completed_ns)
        return {
            "last_enqueued_collective": _seq_id(records[-1]),
            "last_started_collective": started,
            "last_completed_collective": completed,
        }

    def entries(self, records: Sequence[Record]) -> list[Dump]:
        """Return what the ring holds, the newest last."""
        following = sum(map(_entries_of, records))
        newest_first: list[Dump] = []
        for record in reversed(records):
            if len(newest_first) >= self._recorder.ring:
                break
            following -= _entries_of(record)
            newest_first.extend(reversed(self._entries(record, following)))
        kept = newest_first[: self._recorder.ring][::-1]
        return [entry for entry in kept if not (self._recorder.only_active and entry["state"] == "completed")]

    def _entries(self, record: Record, record_id: int) -> list[Dump]:
        """Return the entries of a call; of those of a batch only the closing one ever shows what became of it."""
        call = record.call
        if not call.transfers:
            return [self._entry(record, record_id, record.op_id, f"nccl:{call.operation}", self._progress(record))]
        progress = _NOTHING_SEEN if call.batched else self._progress(record)
        first_op_id = record.op_id - len(call.transfers) + 1
        entries = [
            self._entry(record, record_id + offset, first_op_id + offset, name, progress, is_p2p=True)
            for offset, name in enumerate(_names(record))
        ]
        if call.batched:
            closing = self._entry(
                record, record_id + len(entries), record.op_id, "nccl:coalesced", self._progress(record)
            )
            entries.append(closing | _NO_TENSORS)
        return entries

    def _entry(
        self, record: Record, record_id: int, op_id: int, name: str, progress: Dump, *, is_p2p: bool = False
    ) -> Dump:
        call = record.call
        entry: Dump = {"frames": _FRAMES[call.site]} if self._recorder.frames else {}
        entry |= {
            "record_id": record_id,
            "pg_id": self._local_ids[call.group],
            "process_group": (call.group.name, call.group.desc),
            "thread_name": "pt_main_thread",
            "thread_id": "140190000000000",
            "collective_seq_id": record.collective_seq_id,
            "p2p_seq_id": record.p2p_seq_id,
            "op_id": op_id,
            "profiling_name": name,
            "time_created_ns": self._epoch_ns + record.issued_ns,
            "input_sizes": _lists(call.inputs),
            "input_dtypes": [call.dtype] * len(call.inputs),
            "output_sizes": _lists(call.outputs),
            "output_dtypes": [call.dtype] * len(call.outputs),
            **progress,
            "timeout_ms": TIMEOUT_NS // 1_000_000,
            "is_p2p": is_p2p,
        }
        return entry

    def _progress(self, record: Record) -> Dump:
        """Return what is seen of a call: what the watchdog noted, and what the dump itself finds."""
        started_ns = record.started_ns if self._recorder.timing else None
        if record.completed_ns is None or record.completed_ns > self._seen_until_ns:
            if started_ns is None or started_ns > self._seen_until_ns:
                return _NOTHING_SEEN
            return _NOTHING_SEEN | {
                "state": "started",
                "time_discovered_started_ns": self._epoch_ns + self._seen_until_ns,
            }
        discovered_ns = self._epoch_ns + min(_noted_ns(record.completed_ns), self._seen_until_ns)
        is_retired = self._is_noted(record.completed_ns)
        progress: Dump = {
            "state": "completed",
            "time_discovered_started_ns": None if started_ns is None else discovered_ns,
            "time_discovered_completed_ns": discovered_ns,
            "retired": is_retired,
        }
        if started_ns is not None and is_retired:
            progress["duration_ms"] = (record.completed_ns - started_ns) / 1e6
        return progress

    def _is_noted(self, happened_ns: int | None) -> bool:
        return happened_ns is not None and _noted_ns(happened_ns) <= self._seen_until_ns


_NOTHING_SEEN: Dump = {
    "state": "scheduled",
    "time_discovered_started_ns": None,
    "time_discovered_completed_ns": None,
    "retired": False,
}
_NO_TENSORS: Dump = {"input_sizes": [], "input_dtypes": [], "output_sizes": [], "output_dtypes": []}


def _noted_ns(happened_ns: int) -> int:
    """Return when the watchdog next looks."""
    return (happened_ns // _WATCHDOG_NS + 1) * _WATCHDOG_NS


def _names(record: Record) -> list[str]:
    """Return the names of a call's sends and receives, which speak of group ranks."""
    own = record.call.group.ranks.index(record.rank)
    arrows = {"send": "->", "recv": "<-"}
    return [f"nccl:{verb} {own}{arrows[verb]}{peer}" for verb, peer in record.call.transfers]


def _entries_of(record: Record) -> int:
    """Return how many entries a call takes in the ring: a batch has one more, its closing one."""
    return len(record.call.transfers) + record.call.batched or 1


def _lists(shapes: Iterable[Shape]) -> list[list[int]]:
    return [list(shape) for shape in shapes]


def _seq_id(record: Record) -> int:
    return record.p2p_seq_id if record.call.transfers else record.collective_seq_id
