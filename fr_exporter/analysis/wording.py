"""How evidence names groups, calls and ranks."""

from __future__ import annotations

from collections.abc import Collection

from fr_exporter.analysis.operations import base_name
from fr_exporter.analysis.waitgraph import StuckCall
from fr_exporter.model import Kind, Operation, ProcessGroup
from fr_exporter.ranges import name_ranks

# Evidence counts more ranks than this and does not list them.
MANY = 256


def name_group(group: ProcessGroup) -> str:
    """Return `process group 74 (EXPERT_MODEL_PARALLEL_GROUP)`."""
    return f"process group {group.name} ({group.desc})" if group.desc else f"process group {group.name}"


def name_call(operation: str | None, kind: Kind, seq_id: int, group: ProcessGroup) -> str:
    """Return `all_to_all 20537 of process group 74 (…)`; a send or recv counts on its own."""
    what = "call" if operation is None else base_name(operation)
    number = f"{seq_id}" if kind == "collective" else f"(p2p {seq_id})"
    return f"{what} {number} of {name_group(group)}"


def name_operation(call: Operation) -> str:
    """Return the words for one recorded call; a send or recv with its peers as global ranks."""
    members = call.group.ranks
    if call.kind == "collective" or members is None or call.source is None or call.destination is None:
        return name_call(call.operation, call.kind, call.seq_id, call.group)
    if max(call.source, call.destination) >= len(members):
        return name_call(call.operation, call.kind, call.seq_id, call.group)
    ends = f"from rank {members[call.source]} to rank {members[call.destination]}"
    return f"{base_name(call.operation)} {ends} (p2p {call.p2p_seq_id}) of {name_group(call.group)}"


def name_stuck(call: StuckCall) -> str:
    """Return the words for a call that ranks are stuck in."""
    if call.operation is not None:
        return name_operation(call.operation)
    return name_call(None, call.id.kind, call.id.seq_id, call.group)


def waits(ranks: Collection[int]) -> str:
    """Return `rank 9 waits`, `ranks 0-7 wait`, or `512 ranks wait`: nobody reads more, and each suspect says it."""
    if len(ranks) > MANY:
        return f"{len(ranks)} ranks wait"
    return f"{name_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"
