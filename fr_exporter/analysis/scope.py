"""Which ranks should have dumped, and what the absence of the others means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fr_exporter.analysis.unknown import Absent
from fr_exporter.model import DumpSet


@dataclass(frozen=True, slots=True)
class Attendance:
    """The ranks of the job by what they left here. All tuples are sorted; no rank stands in two of them.

    `excused` ranks are among those without a usable dump; what they left may lie there, and cannot be read or trusted.
    """

    world_size: int
    expected: int
    dumped: tuple[int, ...]
    missing: tuple[int, ...]
    pending: tuple[int, ...]
    stale: tuple[int, ...]
    unreadable: tuple[int, ...]
    remote: tuple[int, ...]
    excused: frozenset[int]

    @property
    def is_complete(self) -> bool:
        """Whether every expected rank has a usable dump, or may still write one."""
        return not (self.missing or self.stale or self.unreadable)

    def absent(self) -> Absent:
        """Return the ranks without a usable dump, and which of them may be named."""
        reasons = {
            **dict.fromkeys(self.missing, "no file"),
            **dict.fromkeys(self.stale, "only a file of an earlier time"),
            **dict.fromkeys(self.unreadable, "its file is unreadable"),
        }
        accusable = {rank: why for rank, why in reasons.items() if rank not in self.excused}
        return Absent(accusable, self.excused.union(self.pending, self.remote))


def attendance(dump_set: DumpSet) -> Attendance:
    """Return who dumped and who did not.

    The job's ranks are the members of every group of the usable dumps, or `world_size`. With scope `node` only ranks
    that ever dumped here are expected; the others are remote.
    """
    job = _job_ranks(dump_set)
    dumped = frozenset(dump_set.dumps)
    here = job | dumped if dump_set.scope == "job" else dumped | dump_set.seen_ranks | dump_set.stale
    absent = here - dumped
    unreadable = {entry.rank for entry in dump_set.unreadable if entry.rank is not None} & absent
    stale = dump_set.stale - dumped - unreadable
    silent = absent - stale - unreadable
    pending = silent | unreadable | stale if dump_set.partial else frozenset[int]()
    may_be_anyones = any(entry.rank is None for entry in dump_set.unreadable)
    return Attendance(
        world_size=dump_set.world_size or max(job | dumped, default=-1) + 1,
        expected=len(here),
        dumped=tuple(sorted(dumped)),
        missing=tuple(sorted(silent - pending)),
        pending=tuple(sorted(pending)),
        stale=tuple(sorted(stale - pending)),
        unreadable=tuple(sorted(unreadable - pending)),
        remote=tuple(sorted(job - here)),
        excused=absent if may_be_anyones else dump_set.disputed & absent,
    )


def _job_ranks(dump_set: DumpSet) -> frozenset[int]:
    if dump_set.world_size is not None:
        return frozenset(range(dump_set.world_size))
    groups = {group for dump in dump_set.dumps.values() for group in dump.groups}
    ranks: set[int] = set()
    for group in groups:
        ranks.update(group.ranks or ())
    return frozenset(ranks)


def node_local_warning(dump_set: DumpSet, attended: Attendance) -> Sequence[str]:
    """Warn where the files look like those of one node only: an aligned block of ranks, and nothing else ever seen."""
    count, world = len(attended.dumped), attended.world_size
    # What came as records was published by its node, and that the others published nothing is no mistake of the scope.
    published = any(dump.accounts is not None for dump in dump_set.dumps.values())
    if dump_set.scope != "job" or published or not 1 < count < world or world % count:
        return ()
    first = attended.dumped[0]
    is_block = attended.dumped == tuple(range(first, first + count)) and first % count == 0
    if not is_block or attended.stale or attended.unreadable or dump_set.seen_ranks - frozenset(attended.dumped):
        return ()
    block = f"only ranks {first}-{first + count - 1} of {world} dumped here"
    return (f"{block}: if this directory holds one node's dumps, use scope node",)
