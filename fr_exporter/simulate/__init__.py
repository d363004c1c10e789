"""Simulate a training job that hangs, and write what its ranks would dump: a drill, and a proof.

`simulate` runs an event model of a Megatron-like job with faults injected and knows the truth; `Job.dump` is what each
rank's flight recorder then holds.
"""

from __future__ import annotations

from fr_exporter.simulate.faults import FAULTS
from fr_exporter.simulate.job import Injection, Job, Plan, simulate
from fr_exporter.simulate.layout import Sizes
from fr_exporter.simulate.program import Schedule
from fr_exporter.simulate.recorder import Recorder
from fr_exporter.simulate.truth import Truth

__all__ = ["FAULTS", "Injection", "Job", "Plan", "Recorder", "Schedule", "Sizes", "Truth", "simulate"]
