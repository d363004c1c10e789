"""Which components made the others wait, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fr_exporter.analysis import alignment, fault, mismatch, order, p2p, stalls
from fr_exporter.analysis.situation import Component, Culprit, Situation
from fr_exporter.diagnosis import Cause

Check = Callable[[Component, Situation], Culprit | None]

# The first check that finds something names the cause.
CHECKS: tuple[Check, ...] = (
    mismatch.check,
    stalls.check_desync,
    stalls.check_device_stall,
    alignment.check,
    p2p.check,
    stalls.check_host_stall,
    fault.check,
    order.check,
)

# What can be told of a call although dumps of its members are missing.
CHECKS_WITH_UNKNOWN: tuple[Check, ...] = (mismatch.check, alignment.check)


@dataclass(frozen=True, slots=True)
class Findings:
    """The culprits by component, and the components that wait for ranks without a dump only."""

    culprits: dict[int, Culprit]
    blocked: Sequence[int]


def find(situation: Situation) -> Findings:
    """Return the culprits among the ranks with a dump: the components that wait for nobody."""
    culprits: dict[int, Culprit] = {}
    blocked = []
    for index, component in enumerate(situation.components):
        # A call that no rank leads to is that of a rank which stands alone.
        if component.waits or not (component.waited_for or _is_stuck(component, situation)):
            continue
        is_blocked = any(call.unknown and call.waits_for_nobody_seen for call in component.calls)
        culprit = _first(CHECKS_WITH_UNKNOWN if is_blocked else CHECKS, component, situation)
        if culprit is not None:
            culprits[index] = culprit
        elif is_blocked:
            blocked.append(index)
    return Findings(culprits, blocked)


def whatever_the_moment(findings: Findings, situation: Situation) -> Findings:
    """Return what stands where every open call is young.

    Ranks then differ in how far they got because each dumped at another moment. What two issued as one call does not
    depend on that, nor that a rank left no dump.
    """
    culprits = {
        index: culprit for index, culprit in findings.culprits.items() if culprit.cause is Cause.COLLECTIVE_MISMATCH
    }
    blocked = [index for index, part in enumerate(situation.components) if any(call.unknown for call in part.calls)]
    return Findings(culprits, blocked)


def _is_stuck(component: Component, situation: Situation) -> bool:
    return any(situation.states[rank].fronts for rank in component.ranks)


def _first(checks: Sequence[Check], component: Component, situation: Situation) -> Culprit | None:
    return next((culprit for check in checks if (culprit := check(component, situation)) is not None), None)
