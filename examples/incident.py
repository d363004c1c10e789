"""An example incident: the flight-recorder dumps of 16 ranks that train a mixture-of-experts model, and stop.

Two pipeline stages of eight ranks each (0-7 and 8-15) train with tensor, expert and data parallelism. In the third
step ranks 12 and 14 leave the all_reduce of their attention layer and never come back to the next call: their hosts
are stuck in Python. All else follows from that.

The truth: ranks 12 and 14 are the suspects, cause `host_stall`. Ranks 13 and 15 wait for both in an all_to_all of the
expert group 34, the first call that hung. Ranks 4 and 6 wait for their gradients, 8 and 10 for them in group 43 at the
end of the step, and the rest waits for these. Ten minutes later the watchdog gives up, and every rank dumps.
"""

from __future__ import annotations

import os
import pickle
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORLD_SIZE = 16
STALLED_RANKS = (12, 14)

_SECOND = 1_000_000_000
_CALL_NS = 20_000_000
_TIMEOUT_MS = 600_000
_STEPS, _MICROBATCHES = 3, 4
# A micro-batch of the second stage has nine calls and a step ends in two more: this is the dispatch of tokens, the
# third call of the second micro-batch of the third step.
_STALLED_BEFORE_CALL = 2 * (9 * _MICROBATCHES + 2) + 9 + 2


@dataclass(frozen=True)
class _Group:
    name: str
    desc: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class _Call:
    """What a rank is about to issue; for a send or recv the group ranks of both ends."""

    group: _Group
    operation: str
    shape: tuple[int, ...]
    site: str
    ends: tuple[int, int] | None = None

    @property
    def profiling_name(self) -> str:
        if self.ends is None:
            return f"nccl:{self.operation}"
        source, destination = self.ends
        return (
            f"nccl:send {source}->{destination}" if self.operation == "send" else f"nccl:recv {destination}<-{source}"
        )


@dataclass
class _Record:
    """A call that was issued; times are in calls since the start."""

    call: _Call
    seq_id: int
    issued: int
    completed: int | None = None


_JOB = _Group("0", "default_pg", tuple(range(WORLD_SIZE)))
_TENSOR = [_Group(f"{11 + i}", "TENSOR_MODEL_PARALLEL_GROUP", (2 * i, 2 * i + 1)) for i in range(8)]
_PIPELINE = [_Group(f"{21 + i}", "PIPELINE_MODEL_PARALLEL_GROUP", (i, i + 8)) for i in range(8)]
_EXPERT = [_Group(f"{31 + i}", "EXPERT_MODEL_PARALLEL_GROUP", tuple(range(4 * i, 4 * i + 4))) for i in range(4)]
_DATA = [
    _Group(f"{41 + i}", "DATA_PARALLEL_GROUP", tuple(range(first, first + 8, 2)))
    for i, first in enumerate((0, 1, 8, 9))
]

_TRAIN_LOOP = (("forward_backward", "/opt/train/schedules.py", 187), ("train", "/opt/train/pretrain.py", 342))
_SITES = {
    "attention": (("reduce", "/opt/train/layers/tensor.py", 31), ("attention", "/opt/train/layers/attention.py", 128)),
    "dispatch": (("all_to_all", "/opt/train/layers/expert.py", 57), ("dispatch", "/opt/train/layers/expert.py", 203)),
    "combine": (("all_to_all", "/opt/train/layers/expert.py", 57), ("combine", "/opt/train/layers/expert.py", 221)),
    "pipeline": (("exchange", "/opt/train/pipeline.py", 76),),
    "optimizer": (("reduce_gradients", "/opt/train/optimizer.py", 94),),
}
_FRAMES = {
    site: [{"name": name, "filename": file, "line": line} for name, file, line in (*frames, *_TRAIN_LOOP)]
    for site, frames in _SITES.items()
}


def write(directory: Path, now_ns: int) -> None:
    """Write `_dump_0` to `_dump_15` into a directory, as if the job had dumped in the last half minute."""
    history = _run()
    last = max(records[-1].issued for records in history.values())
    watchdog_ns = now_ns - 30 * _SECOND
    start_ns = watchdog_ns - _TIMEOUT_MS * 1_000_000 - last * _CALL_NS
    for rank, records in history.items():
        path = directory / f"_dump_{rank}"
        # The writers of these files use protocol 2 as well.
        path.write_bytes(pickle.dumps(_dump(records, start_ns), protocol=2))
        written_ns = watchdog_ns + (rank + 1) * _SECOND
        os.utime(path, ns=(written_ns, written_ns))


def _run() -> Mapping[int, list[_Record]]:
    """Let all ranks work through their programs, each as far as the others let it."""
    programs = {rank: _program(rank) for rank in range(WORLD_SIZE)}
    history: dict[int, list[_Record]] = {rank: [] for rank in range(WORLD_SIZE)}
    meetings: dict[Hashable, list[_Record]] = defaultdict(list)
    counters: Counter[Hashable] = Counter()
    clock, moving = 0, True
    while moving:
        moving = False
        clock += 1
        for rank, records in history.items():
            stalled = rank in STALLED_RANKS and len(records) == _STALLED_BEFORE_CALL
            if stalled or (records and records[-1].completed is None):
                continue
            call = next(programs[rank], None)
            if call is None:
                continue
            moving = True
            counters[rank, call.group] += 1
            record = _Record(call, seq_id=counters[rank, call.group], issued=clock)
            records.append(record)
            # Both ends of a send and recv, or all members of a group, meet at the same count.
            meeting = meetings[call.group, call.ends, record.seq_id]
            meeting.append(record)
            if len(meeting) == len(call.group.ranks):
                for met in meeting:
                    met.completed = clock
    return history


def _program(rank: int) -> Iterator[_Call]:
    """Yield what a rank issues when nothing goes wrong."""
    tensor, pipeline, expert = _TENSOR[rank // 2], _PIPELINE[rank % 8], _EXPERT[rank // 4]
    data = _DATA[rank // 8 * 2 + rank % 2]
    activations = (4096, 1, 5120)
    attention = _Call(tensor, "all_reduce", activations, "attention")
    dispatch = _Call(expert, "all_to_all", (4027, 5120), "dispatch")
    combine = _Call(expert, "all_to_all", (4027, 5120), "combine")
    layers = (attention, dispatch, combine, attention)
    for _ in range(_STEPS):
        for _ in range(_MICROBATCHES):
            if rank < 8:
                yield from layers
                yield _Call(pipeline, "send", activations, "pipeline", ends=(0, 1))
                yield _Call(pipeline, "recv", activations, "pipeline", ends=(1, 0))
                yield from (combine, dispatch, attention)
            else:
                yield _Call(pipeline, "recv", activations, "pipeline", ends=(0, 1))
                yield from layers
                yield from (combine, dispatch, attention)
                yield _Call(pipeline, "send", activations, "pipeline", ends=(1, 0))
        yield _Call(data, "_reduce_scatter_base", (104857600,), "optimizer")
        yield _Call(_JOB, "all_reduce", (1,), "optimizer")


def _dump(records: list[_Record], start_ns: int) -> dict[str, Any]:
    """Return what the recorder of one rank holds; its local group IDs follow the order of first use."""
    groups = list(dict.fromkeys(record.call.group for record in records))
    status = {}
    for local_id, group in enumerate(groups):
        own = [record for record in records if record.call.group == group]
        completed = [record.seq_id for record in own if record.completed is not None]
        status[str(local_id)] = {
            "last_enqueued_collective": own[-1].seq_id,
            "last_started_collective": -1,
            "last_completed_collective": completed[-1] if completed else -1,
        }
    return {
        "version": "2.10",
        "comm_lib_version": "2.27.3",
        "pg_config": {
            group.name: {"name": group.name, "desc": group.desc, "ranks": str(list(group.ranks))} for group in groups
        },
        "pg_status": status,
        "entries": [
            _entry(record_id, groups.index(record.call.group), record, start_ns)
            for record_id, record in enumerate(records)
        ],
    }


def _entry(record_id: int, local_id: int, record: _Record, start_ns: int) -> dict[str, Any]:
    call = record.call
    is_p2p = call.ends is not None
    completed = record.completed is not None
    return {
        "frames": _FRAMES[call.site],
        "record_id": record_id,
        "pg_id": local_id,
        "process_group": (call.group.name, call.group.desc),
        "collective_seq_id": 0 if is_p2p else record.seq_id,
        "p2p_seq_id": record.seq_id if is_p2p else 0,
        "op_id": record.seq_id,
        "profiling_name": call.profiling_name,
        "time_created_ns": start_ns + record.issued * _CALL_NS,
        "input_sizes": [list(call.shape)],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [list(call.shape)],
        "output_dtypes": ["BFloat16"],
        "state": "completed" if completed else "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None if record.completed is None else start_ns + record.completed * _CALL_NS,
        "retired": completed,
        "timeout_ms": _TIMEOUT_MS,
        "is_p2p": is_p2p,
        "thread_id": "1",
        "thread_name": "python3",
    }
