"""The end of a job as it really was: who is stuck in which call, and whom that call lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain

from fr_exporter.simulate.engine import Meeting, Outcome, Record
from fr_exporter.simulate.layout import Layout


@dataclass(frozen=True, slots=True)
class StuckIn:
    """A call that ranks are stuck in because of a rank that is to blame, or because it cannot end."""

    process_group: str
    desc: str
    # The name tells groups of one job apart.
    ranks: tuple[int, ...] = field(compare=False)
    operation: str
    kind: str
    seq_id: int

    @classmethod
    def of(cls, record: Record) -> StuckIn:
        """Describe a call by one rank's record of it."""
        call = record.call
        return cls(
            process_group=call.group.name,
            desc=call.group.desc,
            ranks=call.group.ranks,
            operation=call.operation,
            kind="p2p" if call.transfers else "collective",
            seq_id=record.p2p_seq_id if call.transfers else record.collective_seq_id,
        )


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What there is to see.

    `faulty` are the ranks that a fault befell, `fronts` the oldest call that never ended of each rank that left a
    dump, `lacking` the ranks that have not come to it. `never_ending` are the meetings of fronts to which all came.
    """

    layout: Layout
    outcome: Outcome
    timing: bool
    faulty: frozenset[int]
    fronts: Mapping[int, Record]
    lacking: Mapping[int, frozenset[int]]
    never_ending: frozenset[Meeting]

    @classmethod
    def of(cls, layout: Layout, outcome: Outcome, faulty: frozenset[int], *, timing: bool) -> Aftermath:
        """Look at how a job ended; `timing` tells whether its dumps show which calls were started."""
        fronts = {run.rank: front for run in outcome.runs if run.leaves_dump and (front := run.front) is not None}
        waiting_in = {rank: outcome.unfinished(front) for rank, front in fronts.items()}
        # Thousands of ranks may wait in one meeting, so each is looked at once, and they share what it lacks.
        meetings = dict.fromkeys(chain.from_iterable(waiting_in.values()))
        lacks = {meeting: frozenset(meeting.lacks) for meeting in meetings}
        lacking = {rank: _union(lacks[meeting] for meeting in waiting_in[rank]) for rank in fronts}
        never_ending = frozenset(meeting for meeting in meetings if not lacks[meeting])
        return cls(layout, outcome, timing, faulty, fronts, lacking, never_ending)

    def waits_for(self, rank: int) -> bool:
        """Tell whether a rank without a fault of its own is stuck for this one."""
        return any(rank in lacks for waiter, lacks in self.lacking.items() if waiter not in self.faulty)

    def is_started_elsewhere(self, record: Record) -> bool:
        """Tell whether another rank has started a call."""
        return any(other != record.rank for meeting in self.outcome.unfinished(record) for other in meeting.arrived)

    def seen_open(self, rank: int) -> list[Record]:
        """Return the calls of a rank that its dump shows open."""
        run = self.outcome.runs[rank]
        return [call for call in run.records if call.completed_ns is None or call.completed_ns > run.lost_ns]

    def ranks_in_role(self) -> int:
        """Return how many ranks issue one and the same sequence of calls: those of a pipeline stage."""
        return self.layout.sizes.world_size // self.layout.sizes.pipeline

    def hung(self) -> tuple[StuckIn, ...]:
        """Return the calls in which a rank lacks a faulty one, that a faulty one is stuck in, or that cannot end."""
        found: dict[StuckIn, None] = {}
        for rank, front in self.fronts.items():
            never_ends = not self.never_ending.isdisjoint(self.outcome.unfinished(front))
            if never_ends or rank in self.faulty or not self.faulty.isdisjoint(self.lacking[rank]):
                found[StuckIn.of(front)] = None
        return tuple(found)


def _union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    """Return the union of sets; of one, the set itself."""
    distinct = list(sets)
    return reduce(frozenset.union, distinct) if distinct else frozenset()
