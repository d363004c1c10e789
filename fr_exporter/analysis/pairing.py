"""Which send belongs to which recv.

The k-th open send from a to b pairs with the k-th open recv on b from a. Group ranks are positions in the member list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fr_exporter.analysis.progress import RankState
from fr_exporter.model import Operation


class Peer(NamedTuple):
    """The rank on the other side of a send or recv, and its open counterpart; None where it has none open.

    `completed` tells that the peer has completed the counterpart.
    """

    rank: int
    counterpart: Operation | None
    completed: bool


class OpenPairs:
    """All open sends and recvs, by direction."""

    def __init__(self, states: Mapping[int, RankState]) -> None:
        self._states = states
        self._open: dict[tuple[str, int, int, int], list[Operation]] = {}
        self._place: dict[tuple[int, int], int] = {}
        for rank, state in states.items():
            for call in state.open_calls:
                ends = _ends(call)
                if ends is not None:
                    of_pair = self._open.setdefault((call.group.key, *ends, rank), [])
                    self._place[rank, call.record_id] = len(of_pair)
                    of_pair.append(call)

    def peer_of(self, rank: int, call: Operation) -> Peer | None:
        """Return the other side of one of `rank`'s open calls, None where the call does not name it."""
        ends = _ends(call)
        if ends is None:
            return None
        source, destination = ends
        other = destination if rank == source else source
        if other == rank:
            return None
        theirs = self._open.get((call.group.key, source, destination, other), [])
        place = self._place[rank, call.record_id] + self._ahead(rank, other, call)
        return Peer(other, theirs[place] if 0 <= place < len(theirs) else None, completed=place < 0)

    def _ahead(self, rank: int, other: int, call: Operation) -> int:
        """Return how many more calls of the pair `rank` has done than its peer; 0 where the rings do not tell."""
        counts = []
        for side in (rank, other):
            state = self._states.get(side)
            standing = None if state is None else state.standings.get(call.group.key)
            if standing is None or standing.pairs_done is None:
                return 0
            counts.append(standing.pairs_done.get((call.source, call.destination), 0))
        return counts[0] - counts[1]


def _ends(call: Operation) -> tuple[int, int] | None:
    """Return the global ranks of a send or recv, from and to; None where the call or its group does not tell."""
    members = call.group.ranks
    if call.kind != "p2p" or members is None or call.source is None or call.destination is None:
        return None
    if call.source >= len(members) or call.destination >= len(members):
        return None
    return members[call.source], members[call.destination]
