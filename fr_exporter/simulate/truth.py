"""What is true of a job that ran: who made the others wait, and in which calls.

It follows from what was injected and from what then happened on hosts and devices, never from an analysis of dumps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fr_exporter.simulate.aftermath import Aftermath, StuckIn
from fr_exporter.simulate.faults import FAULTS


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault and the ranks that it befell."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Truth:
    """What a right verdict says.

    It names every rank of `required` and none outside of `allowed`. `causes` are those that the evidence in dumps
    supports, of `hung` any is a right headline. Where a fault is not `decidable`, dumps cannot tell the rank at fault
    from others of `allowed`; the `note` says why.
    """

    seed: int
    world_size: int
    faults: tuple[Injected, ...]
    verdict: str
    required: tuple[int, ...]
    allowed: tuple[int, ...]
    causes: tuple[str, ...]
    hung: tuple[StuckIn, ...]
    decidable: bool
    note: str

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, the content of `truth.json`."""
        return asdict(self)


def tell(aftermath: Aftermath, injected: Sequence[Injected], seed: int) -> Truth:
    """Return the truth of a job that ended in this way after these faults."""
    hangs = any(FAULTS[fault.name].hangs for fault in injected)
    evidence = [FAULTS[fault.name].evidence(aftermath, rank) for fault in injected for rank in fault.ranks]
    notes = dict.fromkeys(each.note for each in evidence if each.note)
    return Truth(
        seed=seed,
        world_size=aftermath.layout.sizes.world_size,
        faults=tuple(injected),
        verdict="hang" if hangs else "healthy",
        required=tuple(sorted(frozenset[int]().union(*(each.required for each in evidence)))),
        allowed=tuple(sorted(frozenset[int]().union(*(each.allowed for each in evidence)))),
        causes=tuple(sorted(frozenset[str]().union(*(each.causes for each in evidence)))),
        hung=aftermath.hung() if hangs else (),
        decidable=not notes,
        note="; ".join(notes),
    )
