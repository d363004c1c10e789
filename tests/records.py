"""Publish dumps and read them back, as between two exporters but without a store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from io import BytesIO

from fr_exporter.analysis.progress import with_accounts
from fr_exporter.model import DumpSet, NodeRecords, RankDump
from fr_exporter.parsing import DumpReader, record
from fr_exporter.parsing.interning import Interning

RECENT_CALLS = 200
MAX_RANKS = 4096


def read_dump(content: bytes, rank: int, *, mtime_ns: int | None = None, node: str | None = None) -> RankDump:
    """Read a dump file's content."""
    reader = DumpReader(1 << 28)
    return reader.read(
        BytesIO(content), size=len(content), rank=rank, node=node, source=f"_dump_{rank}", mtime_ns=mtime_ns
    )


def node_object(dumps: Iterable[RankDump], *, node: str = "node", recent_calls: int = RECENT_CALLS) -> bytes:
    """Return the object of a node with these dumps."""
    return record.encode(NodeRecords("job", 0, node, tuple(map(with_accounts, dumps))), recent_calls)


def read_back(data: bytes, *, mtime_ns: int = 0) -> Sequence[RankDump]:
    """Return what an object says of its ranks."""
    return record.decode(data, Interning(MAX_RANKS), source="object", mtime_ns=mtime_ns).dumps


def through_the_store(dump_set: DumpSet, ranks_per_node: int, *, recent_calls: int = RECENT_CALLS) -> DumpSet:
    """Return a dump set as another exporter sees it from the records of its nodes; each rank keeps its node's name."""
    ranks = sorted(dump_set.dumps)
    read: dict[int, RankDump] = {}
    for first in range(0, len(ranks), ranks_per_node):
        dumps = [dump_set.dumps[rank] for rank in ranks[first : first + ranks_per_node]]
        for dump in read_back(node_object(dumps, recent_calls=recent_calls)):
            read[dump.rank] = replace(dump, node=dump_set.dumps[dump.rank].node)
    return replace(dump_set, dumps=read)
