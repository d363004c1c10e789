"""`DumpSet` -> `Diagnosis`: what hung, and which ranks made the others wait.

The steps, one module each: progress (what is open), waitgraph (who waits for whom), components (who waits for each
other), situation (all of it together), culprits (who waits for nobody, and why), unknown (ranks without a dump), hung
(the process groups), verdict.
"""

from __future__ import annotations

from fr_exporter.analysis import culprits, unknown, verdict
from fr_exporter.analysis.hung import hung_groups
from fr_exporter.analysis.progress import AgeRule, rank_states
from fr_exporter.analysis.scope import attendance
from fr_exporter.analysis.situation import survey
from fr_exporter.diagnosis import Diagnosis
from fr_exporter.model import DumpSet

DEFAULT_MIN_OPEN_AGE_NS = 15_000_000_000


def diagnose(dump_set: DumpSet, *, generated_at_ns: int, min_open_age_ns: int = DEFAULT_MIN_OPEN_AGE_NS) -> Diagnosis:
    """Return the verdict over one dump set.

    `generated_at_ns` is the time that the diagnosis carries, nanoseconds since the epoch. A call younger than
    `min_open_age_ns` when its dump was written is in flight and not stuck, unless an expected rank has no dump.
    """
    attended = attendance(dump_set)
    states = rank_states(dump_set, AgeRule(min_open_age_ns, excuses=attended.is_complete))
    situation = survey(states)
    findings = culprits.find(situation)
    if all(state.is_young for state in states.values() if state.fronts):
        findings = culprits.whatever_the_moment(findings, situation)
    unexplained = unknown.explain(situation, findings, attended.absent())
    accused = tuple(dict.fromkeys((*findings.culprits.values(), *unexplained.culprits)))
    conclusion = verdict.Conclusion(
        dump_set=dump_set,
        attended=attended,
        situation=situation,
        culprits=accused,
        hung=hung_groups(accused, situation),
        awaited=unexplained.awaited,
    )
    return verdict.state(conclusion, generated_at_ns)
