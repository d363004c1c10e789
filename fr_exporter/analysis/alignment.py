"""Whose sequence of calls departs from that of the ranks in the same role.

Replicas of one part of a model issue the same calls in the same order, each in groups of its own: call 87 of the
tensor-parallel group on one is call 87 of the tensor-parallel group on all. So recent calls are compared by the kind of
their group, over as much as the rings hold. Ranks in other roles part ways early, and again in every step; a rank that
left a call out, issued one too many or changed the order parts from its replicas after a long common way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fr_exporter.analysis.operations import base_name
from fr_exporter.analysis.progress import RankState
from fr_exporter.analysis.situation import Accusation, Component, Culprit, Situation
from fr_exporter.analysis.wording import name_operation
from fr_exporter.diagnosis import Cause
from fr_exporter.model import Kind, Outline, ProcessGroup, Standing
from fr_exporter.ranges import name_ranks

# How many replicas to compare with on each side of a rank in each of its groups: a few show what most do.
_NEIGHBOURS = 4

# How far the next call of the others stands behind one that was left out: a batch has several entries.
_BATCH = 4

# How many steps are compared at once.
_STRIDE = 64


class GroupKind(NamedTuple):
    """What the groups of replicas have in common: description, size, and which of such groups of a rank it is."""

    desc: str
    size: int
    number: int


class Step(NamedTuple):
    """A call as every rank in the same role issues it."""

    group: GroupKind
    kind: Kind
    operation: str
    seq_id: int

    @property
    def what(self) -> tuple[GroupKind, str]:
        """The call without its number."""
        return self.group, self.operation


@dataclass(frozen=True, slots=True)
class Track:
    """The steps in a rank's ring, from the first that it has in common with the ranks it is compared with.

    `places` are those of the rank in groups that are used for send/recv: a pipeline stage has a role of its own.
    `skipped` is how many calls of the ring stand before the first step.
    """

    rank: int
    places: frozenset[tuple[GroupKind, int]]
    steps: Sequence[Step]
    skipped: int


@dataclass(frozen=True, slots=True)
class Departure:
    """Where a rank parted from `others`, after `depth` common steps."""

    track: Track
    others: Sequence[Track]
    depth: int

    @property
    def is_transfer(self) -> bool:
        """Whether what makes the difference is a send or recv: one that was left out, or one too many."""
        own, theirs = self.track.steps[self.depth :], self.others[0].steps[self.depth :]
        with_one_more = _alike_for(own[1:], theirs)
        without_theirs = max(_alike_for(own, theirs[missing:]) for missing in range(1, _BATCH))
        return (own if with_one_more > without_theirs else theirs)[0].kind == "p2p"

    def evidence(self, states: Mapping[int, RankState]) -> str:
        """Say which call departs first."""
        other = self.others[0]
        own, theirs = (
            name_operation(states[track.rank].dump.operations[track.skipped + self.depth])
            for track in (self.track, other)
        )
        return (
            f"issued {own} where {name_ranks(track.rank for track in self.others)}, in the same role, issued {theirs}: "
            "the first call in which their sequences differ"
        )


def _alike_for(one: Sequence[Step], other: Sequence[Step]) -> int:
    """Return for how many steps two sequences hold the same calls, whatever their numbers."""
    differing = (index for index, (own, their) in enumerate(zip(one, other, strict=False)) if own.what != their.what)
    return next(differing, min(len(one), len(other)))


def check(component: Component, situation: Situation) -> Culprit | None:
    """Accuse the ranks of a cycle whose sequence of calls departs from that of their replicas, all at a tie."""
    if len(component.ranks) < 2 or not all(call.certain for call in component.calls):
        return None
    departures = list(_departures(component.ranks, situation.states))
    if not departures:
        return None
    accused = {departure.track.rank for departure in departures}
    return Culprit(
        Cause.P2P_UNMATCHED if any(each.is_transfer for each in departures) else Cause.ORDER_DEADLOCK,
        tuple(Accusation(each.track.rank, each.evidence(situation.states), "medium") for each in departures),
        tuple(call for call in component.calls if not accused.isdisjoint({*call.waiters, *call.lacks()})),
    )


def departed(suspected: Sequence[int], states: Mapping[int, RankState]) -> Mapping[int, str]:
    """Return those of the suspected ranks whose sequence of calls departs from that of their replicas, and where."""
    return {found.track.rank: found.evidence(states) for found in _departures(suspected, states)}


def _departures(suspected: Sequence[int], states: Mapping[int, RankState]) -> Iterator[Departure]:
    """Yield the last departure of each of the suspected ranks that stands against as many or more others."""
    places = Places(states)
    known: dict[Step, Step] = {}
    compared = (_track(rank, states[rank], places, known) for rank in _compared(suspected, places))
    last: dict[int, Departure] = {}
    for alike in _alike([track for track in compared if track is not None]):
        for departure in _forks(alike):
            last[departure.track.rank] = departure
    for rank in suspected:
        found = last.get(rank)
        # Ranks in roles that their places do not tell apart part within the first step that the rings hold.
        if found is not None and 2 * found.depth >= len(found.track.steps):
            yield found


class Places:
    """Where ranks stand in the member lists of their groups; a list is searched once, not for every member."""

    def __init__(self, states: Mapping[int, RankState]) -> None:
        self.states = states
        self._places: dict[str, Mapping[int, int]] = {}

    def of(self, rank: int) -> Iterator[tuple[Standing, int]]:
        """Yield the standings of a rank in groups whose members are known, with its group rank."""
        for key, standing in self.states[rank].standings.items():
            if key not in self._places:
                self._places[key] = {member: place for place, member in enumerate(standing.group.ranks or ())}
            place = self._places[key].get(rank)
            if place is not None:
                yield standing, place


def _compared(suspected: Sequence[int], places: Places) -> Collection[int]:
    """Return the suspected ranks and their neighbours in each of their groups."""
    compared = dict.fromkeys(suspected)
    for rank in suspected:
        for standing, place in places.of(rank):
            members = standing.group.ranks or ()
            near = members[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS + 1]
            compared.update(dict.fromkeys(member for member in near if member in places.states))
    return compared


def _track(rank: int, state: RankState, places: Places, known: dict[Step, Step]) -> Track | None:
    """Return what a ring holds as steps, None where it is no history: calls are missing in between, or it is empty.

    Equal steps are one object, by `known`: whole sequences then compare at once.
    """
    calls = state.dump.operations
    if calls.history is None:
        return None
    kinds = _group_kinds(standing.group for standing in state.standings.values())
    group_of = {index: kinds[key] for key, column in calls.by_group.items() for index in column.indices}
    steps = (_step(call, group_of[call.place]) for call in calls.outlines()[calls.history :])
    return Track(
        rank,
        frozenset((kinds[standing.group.key], place) for standing, place in places.of(rank) if standing.mixed),
        [known.setdefault(step, step) for step in steps],
        skipped=calls.history,
    )


def _group_kinds(groups: Iterable[ProcessGroup]) -> Mapping[str, GroupKind]:
    kinds: dict[str, GroupKind] = {}
    seen: dict[tuple[str, int], int] = {}
    for group in groups:
        alike = (group.desc, len(group.ranks or ()))
        seen[alike] = seen.get(alike, -1) + 1
        kinds[group.key] = GroupKind(*alike, seen[alike])
    return kinds


def _step(call: Outline, group: GroupKind) -> Step:
    seq_id = call.p2p_seq_id if call.kind == "p2p" else call.collective_seq_id
    return Step(group, call.kind, base_name(call.operation), seq_id)


def _alike(tracks: Sequence[Track]) -> Iterator[Sequence[Track]]:
    """Yield the tracks of ranks with the same places, each from the first step that all of them hold."""
    by_places: dict[frozenset[tuple[GroupKind, int]], list[Track]] = {}
    for track in tracks:
        by_places.setdefault(track.places, []).append(track)
    for alike in by_places.values():
        common = set(alike[0].steps).intersection(*(track.steps for track in alike[1:]))
        start = next((step for step in alike[0].steps if step in common), None)
        if start is not None:
            yield [_from(track, track.steps.index(start)) for track in alike]


def _from(track: Track, index: int) -> Track:
    return Track(track.rank, track.places, track.steps[index:], track.skipped + index)


def _forks(tracks: Sequence[Track]) -> Iterator[Departure]:
    """Yield who departs from a camp as large or larger wherever ranks that went one way go on differently."""
    together = [(tracks, 0)]
    while together:
        tracks, depth = together.pop()
        longest = max(tracks, key=lambda track: len(track.steps)).steps
        agreed = [(track, _agreed(longest, track.steps, depth)) for track in tracks]
        # A sequence that ends agrees with all that go on.
        fork = min((until for track, until in agreed if until < len(track.steps)), default=None)
        if fork is None:
            continue
        camps: dict[Step, list[Track]] = {}
        for track in tracks:
            if fork < len(track.steps):
                camps.setdefault(track.steps[fork], []).append(track)
        by_size = sorted(camps.values(), key=len, reverse=True)
        for camp in by_size:
            others = by_size[1] if camp is by_size[0] else by_size[0]
            if len(camp) <= len(others):
                yield from (Departure(track, others, fork) for track in camp)
        together.extend((camp, fork + 1) for camp in by_size if len(camp) > 1)


def _agreed(one: Sequence[Step], other: Sequence[Step], depth: int) -> int:
    """Return up to where two sequences are the same, from a depth at which they are."""
    while one[depth : depth + _STRIDE] == other[depth : depth + _STRIDE] and depth < len(other):
        depth += _STRIDE
    end = min(len(one), len(other))
    return next((index for index in range(depth, end) if one[index] != other[index]), end)
