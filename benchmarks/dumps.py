"""Dump sets of any size for the benchmarks, all with one stalled host."""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Mapping, Sequence
from pathlib import Path

TENSOR_PARALLEL = 8
STALLED_RANK = 5
OPEN_CALLS = 20
FRAMES = 27
START_NS = 1_790_000_000_000_000_000
STEP_NS = 2_000_000

# Name -> desc and member list, as torch writes it; in the order of their rank-local ids.
Groups = Mapping[str, tuple[str, str]]


def write_set(directory: Path, ranks: int, calls: int) -> int:
    """Write one dump a rank as torch writes them; return the bytes written.

    There is a group of all ranks, tensor-parallel ones of 8, and data-parallel ones. Every rank issues `calls` calls,
    of which the last 20 are open. `STALLED_RANK` stops 20 calls before the others.
    """
    world = str(list(range(ranks)))
    # Of 20 calls one is of the whole job or of the data-parallel group, in turn.
    local_ids = [1 if index % 20 else (index // 20 + 1) % 2 * 2 for index in range(calls)]
    return sum(
        _write(directory, rank, _dump(_groups(rank, ranks, world), local_ids, _issued(rank, calls)))
        for rank in range(ranks)
    )


def write_world_set(directory: Path, ranks: int, calls: int) -> int:
    """Write one dump a rank of a job with one group, of all ranks; return the bytes written.

    Every rank issues `calls` calls at the same times, of which the last 20 are open, so that all write the same bytes.
    `STALLED_RANK` stops 20 calls before the others.
    """
    groups = {"0": ("default_pg", str(list(range(ranks))))}
    dumps = {issued: _dump(groups, [0] * calls, issued) for issued in (calls, calls - OPEN_CALLS)}
    return sum(_write(directory, rank, dumps[_issued(rank, calls)]) for rank in range(ranks))


def _issued(rank: int, calls: int) -> int:
    return calls - OPEN_CALLS if rank == STALLED_RANK else calls


def _write(directory: Path, rank: int, dump: bytes) -> int:
    directory.mkdir(parents=True, exist_ok=True)
    return (directory / f"nccl_trace_rank_{rank}").write_bytes(dump)


def _groups(rank: int, ranks: int, world: str) -> Groups:
    first_tp = rank - rank % TENSOR_PARALLEL
    return {
        "0": ("default_pg", world),
        str(1 + rank // TENSOR_PARALLEL): ("TENSOR_MODEL_PARALLEL_GROUP", str(list(range(first_tp, first_tp + 8)))),
        str(ranks + rank % TENSOR_PARALLEL): (
            "DATA_PARALLEL_GROUP",
            str(list(range(rank % TENSOR_PARALLEL, ranks, TENSOR_PARALLEL))),
        ),
    }


def _dump(groups: Groups, local_ids: Sequence[int], issued: int) -> bytes:
    """Return the dump of a rank that issued the first calls of a job, which go to groups by these local ids."""
    names = list(groups)
    stack = [_frame(depth) for depth in range(200)]
    counts = dict.fromkeys(names, 0)
    done = dict.fromkeys(names, 0)
    entries = []
    for index, local_id in enumerate(local_ids[:issued]):
        name = names[local_id]
        counts[name] += 1
        is_done = index < len(local_ids) - OPEN_CALLS
        done[name] += is_done
        entries.append(_entry(index, local_id, (name, groups[name][0]), counts[name], is_done, stack))
    dump = {
        "version": "2.10",
        "comm_lib_version": "2.27.5",
        "pg_config": {name: {"name": name, "desc": desc, "ranks": members} for name, (desc, members) in groups.items()},
        "pg_status": {
            str(local_id): {
                "last_enqueued_collective": counts[name] or -1,
                "last_started_collective": -1,
                "last_completed_collective": done[name] or -1,
            }
            for local_id, name in enumerate(names)
        },
        "entries": entries,
    }
    # Like torch, keep no memo entry that nothing reads again.
    return pickletools.optimize(pickle.dumps(dump, protocol=2))


def _frame(depth: int) -> dict[str, object]:
    return {"name": f"forward_{depth}", "filename": f"/opt/train/megatron/core/module_{depth % 40}.py", "line": depth}


def _entry(
    index: int,
    local_id: int,
    group: tuple[str, str],
    seq_id: int,
    is_done: bool,
    stack: Sequence[dict[str, object]],
) -> dict[str, object]:
    issued = START_NS + index * STEP_NS
    offset = index * 7 % (len(stack) - FRAMES)
    return {
        "frames": stack[offset : offset + FRAMES],
        "record_id": index,
        "pg_id": local_id,
        "process_group": group,
        "collective_seq_id": seq_id,
        "p2p_seq_id": 0,
        "op_id": seq_id,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": issued,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": issued + STEP_NS // 2 if is_done else None,
        "input_sizes": [[4096, 1, 5120]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4096, 1, 5120]],
        "output_dtypes": ["BFloat16"],
        "state": "completed" if is_done else "scheduled",
        "retired": is_done,
        "timeout_ms": 600_000,
        "is_p2p": False,
        "thread_id": "140234567890",
        "thread_name": "pt_main_thread",
    }
