"""Dump sets of any size for the benchmarks: one big group, tensor- and data-parallel ones, one stalled host."""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path

TENSOR_PARALLEL = 8
STALLED_RANK = 5
START_NS = 1_790_000_000_000_000_000
STEP_NS = 2_000_000


def write_set(directory: Path, ranks: int, calls: int, frames: int = 27) -> int:
    """Write one dump a rank as torch writes them; return the bytes written.

    Every rank issues `calls` calls, of which the last 20 are open. `STALLED_RANK` stops 20 calls before the others.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written = 0
    world = str(list(range(ranks)))
    for rank in range(ranks):
        # Like torch, keep no memo entry that nothing reads again.
        data = pickletools.optimize(pickle.dumps(_dump(rank, ranks, calls, frames, world), protocol=2))
        (directory / f"nccl_trace_rank_{rank}").write_bytes(data)
        written += len(data)
    return written


def _dump(rank: int, ranks: int, calls: int, frames: int, world: str) -> dict[str, object]:
    first_tp = rank - rank % TENSOR_PARALLEL
    groups = {
        "0": ("default_pg", world),
        str(1 + rank // TENSOR_PARALLEL): ("TENSOR_MODEL_PARALLEL_GROUP", str(list(range(first_tp, first_tp + 8)))),
        str(ranks + rank % TENSOR_PARALLEL): (
            "DATA_PARALLEL_GROUP",
            str(list(range(rank % TENSOR_PARALLEL, ranks, TENSOR_PARALLEL))),
        ),
    }
    names = list(groups)
    stack = [_frame(depth) for depth in range(200)]
    issued = calls - 20 if rank == STALLED_RANK else calls
    counts = dict.fromkeys(names, 0)
    done = dict.fromkeys(names, 0)
    entries = []
    for index in range(issued):
        name = names[1 if index % 20 else (index // 20 + 1) % 2 * 2]
        counts[name] += 1
        is_done = index < calls - 20
        done[name] += is_done
        entries.append(_entry(index, names.index(name), (name, groups[name][0]), counts[name], is_done, stack, frames))
    return {
        "version": "2.10",
        "comm_lib_version": "2.27.5",
        "pg_config": {name: {"name": name, "desc": desc, "ranks": members} for name, (desc, members) in groups.items()},
        "pg_status": {
            str(local): {
                "last_enqueued_collective": counts[name],
                "last_started_collective": -1,
                "last_completed_collective": done[name],
            }
            for local, name in enumerate(names)
        },
        "entries": entries,
    }


def _frame(depth: int) -> dict[str, object]:
    return {"name": f"forward_{depth}", "filename": f"/opt/train/megatron/core/module_{depth % 40}.py", "line": depth}


def _entry(
    index: int,
    local_id: int,
    group: tuple[str, str],
    seq_id: int,
    is_done: bool,
    stack: list[dict[str, object]],
    frames: int,
) -> dict[str, object]:
    issued = START_NS + index * STEP_NS
    offset = index * 7 % (len(stack) - frames)
    return {
        "frames": stack[offset : offset + frames],
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
