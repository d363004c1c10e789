"""All that a check may look at, worked out once: states, wait-for graph, components, and who issued which call."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fr_exporter.analysis import waitgraph
from fr_exporter.analysis.comparison import compare
from fr_exporter.analysis.components import components
from fr_exporter.analysis.progress import RankState
from fr_exporter.analysis.waitgraph import CallId, Node, StuckCall, WaitGraph
from fr_exporter.diagnosis import Cause, Confidence, Mismatch
from fr_exporter.model import Operation, ProcessGroup


@dataclass(frozen=True, slots=True)
class Component:
    """Ranks and calls that wait for each other. `waits` tells whether they also wait for anybody else."""

    ranks: tuple[int, ...]
    calls: tuple[StuckCall, ...]
    waits: bool
    waited_for: bool


@dataclass(frozen=True, slots=True)
class Accusation:
    """One suspect of a culprit, with the evidence in one sentence."""

    rank: int
    evidence: str
    confidence: Confidence


@dataclass(frozen=True, slots=True)
class Culprit:
    """A component that waits for nobody and made others wait, its cause, and the suspects in it.

    `calls` are the stuck calls that are the culprit's own: the mismatched one, the ones of a cycle.
    """

    cause: Cause
    suspects: tuple[Accusation, ...]
    calls: tuple[StuckCall, ...] = ()

    @property
    def ranks(self) -> frozenset[int]:
        """The suspects' ranks."""
        return frozenset(accusation.rank for accusation in self.suspects)


@dataclass(frozen=True, slots=True)
class Situation:
    """What the dumps of a set show together.

    `components` stand in an order in which each comes after those that it waits for. `issued` holds, for each stuck or
    disputed collective, what each rank issued as that call, and `mismatches` in what they differ. `lacking` holds, for
    each rank that waits for nobody, the stuck calls that wait directly for it.
    """

    states: Mapping[int, RankState]
    graph: WaitGraph
    components: Sequence[Component]
    component_of: Mapping[Node, int]
    issued: Mapping[tuple[str, int], Mapping[int, Operation]]
    mismatches: Mapping[tuple[str, int], Sequence[Mismatch]]
    lacking: Mapping[int, Sequence[StuckCall]]

    def issued_as(self, group: ProcessGroup, seq_id: int) -> Mapping[int, Operation]:
        """Return what each rank issued as this collective, where its ring still holds it."""
        return self.issued.get((group.key, seq_id), {})


def survey(states: Mapping[int, RankState]) -> Situation:
    """Work out the situation from the states of the ranks with a dump."""
    graph = waitgraph.build(states)
    found = components(graph.edges)
    component_of = {node: index for index, nodes in enumerate(found) for node in nodes}
    leads_out = [False] * len(found)
    led_into = [False] * len(found)
    for node, successors in graph.edges.items():
        for successor in successors:
            if component_of[node] != component_of[successor]:
                leads_out[component_of[node]] = True
                led_into[component_of[successor]] = True
    parts = [_component(nodes, graph, leads_out[index], led_into[index]) for index, nodes in enumerate(found)]
    disputed = _disputed(graph)
    issued = _issued(states, disputed.keys())
    return Situation(
        states=states,
        graph=graph,
        components=parts,
        component_of=component_of,
        issued=issued,
        mismatches={call: compare(disputed[call], call[1], by_rank) for call, by_rank in issued.items()},
        lacking=_lacking(graph, {rank for part in parts if not part.waits for rank in part.ranks}),
    )


def _component(nodes: Sequence[Node], graph: WaitGraph, waits: bool, waited_for: bool) -> Component:
    return Component(
        ranks=tuple(sorted(node for node in nodes if isinstance(node, int))),
        calls=tuple(graph.calls[node] for node in nodes if isinstance(node, CallId)),
        waits=waits,
        waited_for=waited_for,
    )


def _lacking(graph: WaitGraph, ranks: set[int]) -> dict[int, list[StuckCall]]:
    lacking: dict[int, list[StuckCall]] = {rank: [] for rank in ranks}
    for call in graph.calls.values():
        for rank in call.lacks() & ranks if graph.edges[call.id] else ():
            if call.waiters != (rank,):
                lacking[rank].append(call)
    return lacking


def _disputed(graph: WaitGraph) -> dict[tuple[str, int], ProcessGroup]:
    """Return the collectives that ranks are stuck in or that set a rank apart, with their groups."""
    disputed = {(of.group_key, of.seq_id): call.group for of, call in graph.calls.items() if of.kind == "collective"}
    for reference in (*graph.own_fault.values(), *graph.odd.values()):
        if reference.collective is not None:
            group, seq_id = reference.collective
            disputed[group.key, seq_id] = group
    return disputed


def _issued(
    states: Mapping[int, RankState], disputed: Collection[tuple[str, int]]
) -> dict[tuple[str, int], dict[int, Operation]]:
    issued: dict[tuple[str, int], dict[int, Operation]] = {call: {} for call in disputed}
    seq_ids: dict[str, set[int]] = {}
    for key, seq_id in disputed:
        seq_ids.setdefault(key, set()).add(seq_id)
    for rank, state in states.items():
        calls = state.dump.operations
        for key in seq_ids.keys() & calls.by_group.keys():
            for seq_id in seq_ids[key].intersection(calls.by_group[key].collective_seq_ids):
                call = calls.issued_as(key, seq_id)
                if call is not None:
                    issued[key, seq_id][rank] = call
    return issued
