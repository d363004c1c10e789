"""Ranks without a usable dump: which of them are victims too, and which are the reason.

The culprits that are seen come first. A rank without a dump that is a member of a call which they explain is presumed
a victim, and so explains its own waiters. Those that remain and are waited for are named.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fr_exporter.analysis.culprits import Findings
from fr_exporter.analysis.situation import Accusation, Culprit, Situation
from fr_exporter.analysis.waitgraph import Node, StuckCall
from fr_exporter.analysis.wording import name_stuck, waits
from fr_exporter.diagnosis import Cause, Confidence


@dataclass(frozen=True, slots=True)
class Absent:
    """The ranks without a usable dump, and why for those that may be accused: `missing`, `stale` or `unreadable`."""

    reasons: Mapping[int, str]
    not_accusable: frozenset[int]


@dataclass(frozen=True, slots=True)
class Unexplained:
    """What the absent ranks explain: the culprits among them, and whose dumps would settle the rest."""

    culprits: tuple[Culprit, ...]
    awaited: frozenset[int]


def explain(situation: Situation, findings: Findings, absent: Absent) -> Unexplained:
    """Return the absent ranks that made others wait."""
    explained = set(findings.culprits)
    victims = _spread(situation, explained, findings.blocked)
    found: list[tuple[set[int], list[StuckCall]]] = []
    awaited: set[int] = set()
    for index in findings.blocked:
        if index in explained:
            continue
        calls = [call for call in situation.components[index].calls if call.unknown]
        unmet = {rank for call in calls for rank in call.unknown} - victims
        accused = unmet & absent.reasons.keys()
        awaited |= unmet & absent.not_accusable
        if accused:
            found.append((accused, calls))
    # One absent rank among many that dumped tells more than a whole node of them, or than one beside a seen culprit.
    is_only_one = not findings.culprits and len(set[int]().union(*(accused for accused, _ in found))) == 1
    confidence: Confidence = "medium" if is_only_one else "low"
    culprits = [_accuse(accused, calls, absent, confidence) for accused, calls in found]
    return Unexplained(_merged(culprits), frozenset(awaited))


def _spread(situation: Situation, explained: set[int], blocked: Collection[int]) -> set[int]:
    """Grow `explained` to the components that lead to an explained one; return the presumed victims."""
    victims: set[int] = set()
    while True:
        _reach(situation, explained)
        for index in explained:
            for call in situation.components[index].calls:
                victims.update(call.unknown)
        released = {
            index
            for index in blocked
            if index not in explained
            and any(not victims.isdisjoint(call.unknown) for call in situation.components[index].calls)
        }
        if not released:
            return victims
        explained |= released


def _reach(situation: Situation, explained: set[int]) -> None:
    for index, component in enumerate(situation.components):
        nodes: tuple[Node, ...] = (*component.ranks, *(call.id for call in component.calls))
        if index not in explained and any(
            situation.component_of[successor] in explained
            for node in nodes
            for successor in situation.graph.edges[node]
        ):
            explained.add(index)


def _accuse(accused: set[int], calls: list[StuckCall], absent: Absent, confidence: Confidence) -> Culprit:
    waiting = f"{waits({rank for call in calls for rank in call.waiters})} for it in {name_stuck(calls[0])}"
    accusations = tuple(
        Accusation(rank, f"left no usable dump ({absent.reasons[rank]}); {waiting}", confidence)
        for rank in sorted(accused)
    )
    return Culprit(Cause.MISSING_DUMP, accusations, tuple(calls))


def _merged(culprits: list[Culprit]) -> tuple[Culprit, ...]:
    """Join the culprits that name the same ranks: they are waited for in several calls."""
    merged: dict[frozenset[int], Culprit] = {}
    for culprit in culprits:
        known = merged.get(culprit.ranks)
        calls = culprit.calls if known is None else known.calls + culprit.calls
        merged[culprit.ranks] = Culprit(culprit.cause, culprit.suspects, calls)
    return tuple(merged.values())
