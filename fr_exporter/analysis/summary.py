"""The one sentence that a tired human reads first."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fr_exporter.analysis.scope import Attendance
from fr_exporter.analysis.situation import Situation
from fr_exporter.analysis.wording import name_call
from fr_exporter.diagnosis import Cause, HungGroup, Suspect, Verdict
from fr_exporter.ranges import name_ranks

# What the suspects did, for one rank and for several.
_DEEDS: dict[Cause, tuple[str, str]] = {
    Cause.COLLECTIVE_MISMATCH: ("issued another call than the rest", "issued another call than the rest"),
    Cause.HOST_STALL: ("stopped issuing calls", "stopped issuing calls"),
    Cause.DEVICE_STALL: ("is stalled on its device", "are stalled on their devices"),
    Cause.DESYNC: ("ran ahead of the rest", "ran ahead of the rest"),
    Cause.COMMUNICATION_FAULT: ("is in a call that does not end", "are all in one call that does not end"),
    Cause.ORDER_DEADLOCK: ("issued calls in another order", "issued calls in different orders"),
    Cause.P2P_UNMATCHED: ("never met a send or recv", "never met a send or recv"),
    Cause.MISSING_DUMP: ("left no usable dump", "left no usable dump"),
}


def summarize(
    verdict: Verdict,
    suspects: Sequence[Suspect],
    hung: Sequence[HungGroup],
    situation: Situation,
    attended: Attendance,
    awaited: Collection[int],
    laggards: Sequence[int],
) -> str:
    """Return the verdict in words."""
    if verdict == "hang":
        return _hang(suspects, hung, situation)
    if verdict == "healthy":
        return f"No hang: none of the {len(attended.dumped)} ranks with a dump is stuck."
    return _inconclusive(situation, attended, awaited, laggards)


def _hang(suspects: Sequence[Suspect], hung: Sequence[HungGroup], situation: Situation) -> str:
    by_cause: dict[Cause, list[int]] = {}
    for suspect in suspects:
        by_cause.setdefault(suspect.cause, []).append(suspect.rank)
    deeds = "; ".join(
        f"{name_ranks(ranks)} {_DEEDS[cause][len(ranks) > 1]}" for cause, ranks in sorted(by_cause.items())
    )
    deeds = deeds[0].upper() + deeds[1:]
    if not hung:
        return f"{deeds}."
    first = hung[0]
    stuck = sum(1 for state in situation.states.values() if state.fronts)
    named = name_call(first.operation, first.kind, first.seq_id or 0, first.group)
    if first.cause is Cause.COMMUNICATION_FAULT:
        return f"{deeds}: {named}; a link, switch, NCCL or device failed, {_ranks(stuck)} stuck."
    if stuck == 1:
        return f"{deeds}; 1 rank is stuck, in {named}."
    return f"{deeds}; {_ranks(stuck)} stuck, {len(first.waiting_ranks)} of them directly in {named}."


def _ranks(count: int) -> str:
    return "1 rank is" if count == 1 else f"{count} ranks are"


def _inconclusive(situation: Situation, attended: Attendance, awaited: Collection[int], laggards: Sequence[int]) -> str:
    if not situation.states:
        return "No usable dump: nothing can be told."
    if laggards:
        lag = "lags" if len(laggards) == 1 else "lag"
        return (
            f"No dump holds any call; by the counters {name_ranks(laggards)} {lag}. Dumps with calls would settle it."
        )
    stuck = [rank for rank, state in situation.states.items() if state.fronts]
    if not stuck:
        return "Calls are open only in groups whose members the dumps do not list: who waits for whom is unknown."
    first = situation.states[stuck[0]].fronts[0]
    name = None if first.operation is None else first.operation.operation
    named = name_call(name, first.kind, first.seq_id, first.group)
    remote = frozenset(awaited) & frozenset(attended.remote)
    if remote:
        return f"{_ranks(len(stuck))} waiting on ranks outside this node ({name_ranks(remote)}), in {named}."
    if awaited:
        return f"{_ranks(len(stuck))} stuck in {named}; the dumps of {name_ranks(awaited)} would settle it."
    return f"{_ranks(len(stuck))} stuck, the first in {named}, and the dumps do not tell who made them wait."
