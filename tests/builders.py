"""Build the dumps that the ranks of a job write, from what the ranks did.

    job = Job(world_size=8)
    tp = job.group("5", "mesh_tp", [0, 1, 2, 3])
    job.collective(tp)                        # every member issues it, so it completes
    job.collective(tp, by=tp.without(3))      # rank 3 never issues it: open on the others
    job.write(tmp_path)                       # _dump_0 … _dump_7, a minute after the last call

A call is done when every rank it needs has issued it and what stands before it in its group is done, unless `done`
says otherwise. `Job.dumps` gives plain dicts of version 2.10, to be changed at will; the `as_` functions turn one into
another format; `write` makes files of them.
"""

from __future__ import annotations

import json
import os
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fr_exporter.simulate.formats import as_json

Dump = dict[str, Any]
Sizes = list[list[int]]

SECOND = 1_000_000_000
START_NS = 1_790_000_000 * SECOND
FRAMES = [
    {"name": "all_reduce", "filename": "/opt/torch/distributed/distributed_c10d.py", "line": 2501},
    {"name": "train_step", "filename": "/srv/train.py", "line": 118},
]


@dataclass(frozen=True)
class Group:
    """A process group. `before` collectives were issued and completed on all members before the ring begins."""

    name: str
    desc: str
    ranks: tuple[int, ...]
    before: int = 0

    def without(self, *ranks: int) -> list[int]:
        """Return the members except `ranks`."""
        return [rank for rank in self.ranks if rank not in ranks]


@dataclass
class Event:
    """One entry of one rank's ring. `done` None: follows from what the other ranks did."""

    group: Group
    operation: str
    is_p2p: bool
    collective_seq_id: int
    p2p_seq_id: int
    op_id: int
    input_sizes: Sizes
    output_sizes: Sizes
    dtype: str
    issued_ns: int
    done: bool | None = None
    started: bool = False
    in_batch: bool = False
    parts: list[Event] = field(default_factory=list)


class Job:
    """A job of `world_size` ranks with a default group of all of them.

    Calls are a millisecond apart; `now_ns` is the time of the next. `timing` is TORCH_NCCL_ENABLE_TIMING: without it
    nothing is ever seen as started. `record_ids` is the number each rank's ring begins with.
    """

    def __init__(self, world_size: int, *, backend: str = "nccl", timing: bool = False, before: int = 0) -> None:
        self.backend = backend
        self.timing = timing
        self.now_ns = START_NS
        self.record_ids = dict.fromkeys(range(world_size), 0)
        self._groups: list[Group] = []
        self._events: dict[int, list[Event]] = {rank: [] for rank in range(world_size)}
        self._issued: Counter[tuple[int, Group, str]] = Counter()
        self._collectives: defaultdict[Group, defaultdict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
        self._pairs: defaultdict[tuple[Group, int, int], dict[str, list[Event]]] = defaultdict(
            lambda: {"send": [], "recv": []}
        )
        self.world = self.group("0", "default_pg", range(world_size), before=before)

    def group(self, name: str, desc: str, ranks: Iterable[int], *, before: int = 0) -> Group:
        """Create a process group on its members, each of which gives it its next local id."""
        group = Group(name, desc, tuple(ranks), before)
        self._groups.append(group)
        return group

    def collective(
        self,
        group: Group,
        operation: str = "all_reduce",
        *,
        by: Iterable[int] | None = None,
        sizes: Sizes | None = None,
        output_sizes: Sizes | None = None,
        dtype: str = "Float",
        done: bool | Collection[int] | None = None,
        started: Collection[int] = (),
        times: int = 1,
    ) -> None:
        """Issue a collective on the ranks `by` (all members), `times` times in a row.

        `done` is True, False, or the ranks that completed it; `started` are ranks whose device is in it.
        """
        inputs = [[256]] if sizes is None else sizes
        for _ in range(times):
            for rank in list(group.ranks if by is None else by):
                self._issued[rank, group, "collective"] += 1
                event = self._record(rank, group, operation, inputs, inputs if output_sizes is None else output_sizes)
                event.dtype, event.started = dtype, rank in started
                event.done = done if done is None or isinstance(done, bool) else rank in done
                self._collectives[group][event.collective_seq_id].append(event)
            self.sleep(0.001)

    def coalesced(self, group: Group, operation: str, *, by: Iterable[int] | None = None) -> None:
        """Issue two collectives as one batch: one sequence ID, never completed themselves, a closing entry that is."""
        for rank in group.ranks if by is None else by:
            self._issued[rank, group, "collective"] += 1
            parts = [self._record(rank, group, operation, [[256]], [[512]]) for _ in range(2)]
            for part in parts:
                part.in_batch = True
            closing = self._close(rank, group, parts)
            self._collectives[group][closing.collective_seq_id].append(closing)
        self.sleep(0.001)

    def send(self, group: Group, source: int, destination: int, *, done: bool | None = None) -> None:
        """Issue a send on the global rank `source`."""
        self._issued[source, group, "p2p"] += 1
        self._p2p(group, "send", source, destination).done = done
        self.sleep(0.001)

    def recv(self, group: Group, destination: int, source: int, *, done: bool | None = None) -> None:
        """Issue a recv on the global rank `destination`."""
        self._issued[destination, group, "p2p"] += 1
        self._p2p(group, "recv", destination, source).done = done
        self.sleep(0.001)

    def batch(self, group: Group, rank: int, *calls: tuple[str, int], closing_entry: bool = True) -> None:
        """Issue sends and recvs (`("send", peer)`) as one batch, as `batch_isend_irecv` does."""
        self._issued[rank, group, "p2p"] += 1
        parts = [self._p2p(group, verb, rank, peer) for verb, peer in calls]
        for part in parts:
            part.in_batch = True
        if closing_entry:
            self._close(rank, group, parts)
        self.sleep(0.001)

    def sleep(self, seconds: float) -> None:
        """Let time pass before the next call."""
        self.now_ns += int(seconds * SECOND)

    def dumps(self, *, ranks: Iterable[int] | None = None) -> dict[int, Dump]:
        """Return what each of `ranks` (all) would dump now, as dicts of version 2.10."""
        self._settle()
        return {rank: self._dump(rank) for rank in (self._events if ranks is None else ranks)}

    def write(self, directory: Path, *, ranks: Iterable[int] | None = None, name: str = "_dump_{rank}") -> Path:
        """Write the dumps of `ranks` (all) a minute from now, when the watchdog's timeout has passed."""
        return write(directory, self.dumps(ranks=ranks), name=name, mtime_ns=self.now_ns + 60 * SECOND)

    def _record(self, rank: int, group: Group, operation: str, inputs: Sizes, outputs: Sizes) -> Event:
        self._issued[rank, group, "op"] += 1
        event = Event(
            group=group,
            operation=operation if ":" in operation else f"{self.backend}:{operation}",
            is_p2p=False,
            collective_seq_id=self._issued[rank, group, "collective"] + group.before,
            p2p_seq_id=self._issued[rank, group, "p2p"],
            op_id=self._issued[rank, group, "op"] + group.before,
            input_sizes=inputs,
            output_sizes=outputs,
            dtype="Float",
            issued_ns=self.now_ns + 10_000 * rank,
        )
        self._events[rank].append(event)
        return event

    def _p2p(self, group: Group, verb: str, rank: int, peer: int) -> Event:
        own, other = group.ranks.index(rank), group.ranks.index(peer)
        operation = f"send {own}->{other}" if verb == "send" else f"recv {own}<-{other}"
        event = self._record(rank, group, operation, [[512]], [[512]])
        event.is_p2p = True
        source, destination = (rank, peer) if verb == "send" else (peer, rank)
        self._pairs[group, source, destination][verb].append(event)
        return event

    def _close(self, rank: int, group: Group, parts: list[Event]) -> Event:
        closing = self._record(rank, group, "coalesced", [], [])
        closing.op_id, closing.parts = parts[-1].op_id, parts
        return closing

    def _settle(self) -> None:
        """Give every call that says nothing of itself its `done`."""
        for group, calls in self._collectives.items():
            stuck = False
            for _, events in sorted(calls.items()):
                arrived = len(events) == len(group.ranks)
                for event in events:
                    event.done = arrived and not stuck if event.done is None else event.done
                stuck = stuck or not all(event.done for event in events)
        for pair in self._pairs.values():
            matched = min(len(pair["send"]), len(pair["recv"]))
            for events in pair.values():
                for index, event in enumerate(events):
                    event.done = index < matched if event.done is None else event.done
        for closing in (event for events in self._events.values() for event in events if event.parts):
            if closing.done is None:
                closing.done = all(part.done for part in closing.parts)
            for part in closing.parts:
                part.done = closing.done

    def _dump(self, rank: int) -> Dump:
        """Return one rank's dump. Only groups whose communicator was made, by a first call, are listed."""
        events = self._events[rank]
        mine = [group for group in self._groups if rank in group.ranks]
        used = {event.group for event in events} | {group for group in mine if group.before}
        local_ids = {group: index for index, group in enumerate(mine) if group in used}
        first = self.record_ids[rank]
        return {
            "version": "2.10",
            "pg_config": {
                group.name: {
                    "name": group.name,
                    "desc": "" if self.backend == "gloo" else group.desc,
                    "ranks": str(list(group.ranks)),
                }
                for group in local_ids
            },
            "comm_lib_version": "" if self.backend == "gloo" else "2.27.5",
            "pg_status": {
                str(local_id): self._status(group, [event for event in events if event.group == group])
                for group, local_id in local_ids.items()
            },
            "entries": [
                self._entry(event, first + index, local_ids[event.group]) for index, event in enumerate(events)
            ],
        }

    def _status(self, group: Group, events: list[Event]) -> dict[str, int]:
        """Return a group's counters: those of its last call of either kind."""

        def last(among: Iterable[Event]) -> int:
            numbers = [event.p2p_seq_id if _counts_p2p(event) else event.collective_seq_id for event in among]
            return numbers[-1] if numbers else group.before or -1

        return {
            "last_enqueued_collective": last(events),
            "last_started_collective": last(e for e in events if e.started or e.done) if self.timing else -1,
            "last_completed_collective": last(event for event in events if event.done),
        }

    def _entry(self, event: Event, record_id: int, local_id: int) -> Dump:
        gloo = self.backend == "gloo"
        completed = bool(event.done) and not event.in_batch and not gloo
        started = self.timing and (event.started or completed)
        return {
            "record_id": record_id,
            "pg_id": local_id,
            "process_group": (event.group.name, event.group.desc),
            "collective_seq_id": event.collective_seq_id,
            "p2p_seq_id": event.p2p_seq_id,
            "op_id": event.op_id,
            "profiling_name": event.operation,
            "time_created_ns": event.issued_ns,
            "input_sizes": event.input_sizes,
            "input_dtypes": [event.dtype] * len(event.input_sizes),
            "output_sizes": event.output_sizes,
            "output_dtypes": [event.dtype] * len(event.output_sizes),
            "state": "completed" if completed else "started" if started else "scheduled",
            "time_discovered_started_ns": event.issued_ns + 100_000 if started else None,
            "time_discovered_completed_ns": event.issued_ns + 500_000 if completed else None,
            "retired": completed or (gloo and bool(event.done)),
            "timeout_ms": 600_000,
            "is_p2p": event.is_p2p,
            "thread_id": "140190000000000",
            "thread_name": "pt_main_thread",
            "frames": FRAMES,
        }


def _counts_p2p(event: Event) -> bool:
    return event.is_p2p or any(part.is_p2p for part in event.parts)


def as_collected(dump: Dump, *, gpu: str = "Healthy", nic: str = "Healthy") -> Dump:
    """Return a dump as NVIDIA's collector stores it: JSON with the health checks of the rank's devices."""
    checks = {device: {"status": status, "output": ""} for device, status in (("gpu", gpu), ("nic", nic))}
    return as_json(dump) | {"health_check_results": checks}


def as_torchcomms(dump: Dump) -> Dump:
    """Return a dump as torchcomms writes it: no counters, and one sequence over all communicators, from 0."""
    entries = [
        entry | {"collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False}
        for number, entry in enumerate(dump["entries"])
    ]
    return dump | {"pg_status": {}, "entries": entries}


def encode(dump: Any) -> bytes:
    """Return a dump as the bytes of a file: a pickle of protocol 2, as torch writes."""
    return pickle.dumps(dump, protocol=2)


def encode_json(dump: Any) -> bytes:
    """Return a dump as the bytes of a JSON file."""
    return json.dumps(dump).encode()


def write(
    directory: Path,
    dumps: Mapping[int, Any],
    *,
    mtime_ns: int | Mapping[int, int],
    name: str = "_dump_{rank}",
    encoder: Callable[[Any], bytes] = encode,
) -> Path:
    """Write one file a rank, in the order of `dumps`; a single `mtime_ns` means 0.2 s from rank to rank."""
    for rank, dump in dumps.items():
        path = directory / name.format(rank=rank)
        path.write_bytes(encoder(dump))
        moment = mtime_ns + rank * SECOND // 5 if isinstance(mtime_ns, int) else mtime_ns[rank]
        os.utime(path, ns=(moment, moment))
    return directory
