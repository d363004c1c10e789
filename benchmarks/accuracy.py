"""Measure how often each tool names the right ranks: simulated incidents with a known truth, over a grid.

    python benchmarks/accuracy.py                      # the whole grid; writes docs/accuracy.md and its picture
    python benchmarks/accuracy.py --show NAME          # one set: the truth and what each tool says
    python benchmarks/accuracy.py --faults ahead --limit 40

Peers are asked where they can be imported; `peers.py` says how to get them and how their answers are read.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import NamedTuple

from accuracy_report import Score, Scored, draw, publish, render
from peers import TOOLS, Answer, Tool

from fr_exporter.errors import UsageError
from fr_exporter.simulate import FAULTS, Injection, Job, Plan, Recorder, Schedule, Sizes, Truth, formats, simulate

DOCS = Path(__file__).parents[1] / "docs"
PREFIX = "_dump_"
EPOCH_NS = 1_790_000_000_000_000_000

# Sizes of jobs, and how many seeds of each.
GRID: tuple[tuple[Sizes, int], ...] = (
    (Sizes(data=8), 8),
    (Sizes(tensor=2, data=4), 8),
    (Sizes(tensor=4, data=2), 8),
    (Sizes(tensor=2, pipeline=2, data=2), 8),
    (Sizes(pipeline=4, data=3), 8),
    (Sizes(tensor=2, pipeline=4, data=2), 8),
    (Sizes(tensor=2, data=8, expert=4), 8),
    (Sizes(tensor=2, pipeline=2, data=4, expert=4), 8),
    (Sizes(context=2, data=4, pipeline=2), 8),
    (Sizes(context=4, data=2, tensor=2), 8),
    (Sizes(tensor=4, pipeline=4, data=4), 5),
    (Sizes(tensor=2, pipeline=4, data=8, expert=8), 3),
    (Sizes(tensor=4, context=2, pipeline=2, data=8), 3),
    (Sizes(tensor=8, pipeline=4, data=8), 2),
    (Sizes(tensor=8, pipeline=4, data=16), 1),
)

# Faults that befall several ranks at once.
SEVERAL = ("host_stall x2", "host_stall x3", "killed x2")

KINDS = [*FAULTS, *SEVERAL]

# In sets of every third seed the recorder notes when calls start, as with TORCH_NCCL_ENABLE_TIMING.
_TIMED_EVERY = 3


class Case(NamedTuple):
    """One set of the grid."""

    fault: str
    sizes: Sizes
    seed: int

    @property
    def name(self) -> str:
        """The name that `--show` takes."""
        parallel = "-".join(
            f"{letter}{getattr(self.sizes, axis)}"
            for letter, axis in zip("tpdec", ("tensor", "pipeline", "data", "expert", "context"), strict=True)
        )
        return f"{self.fault}/{parallel}/{self.seed}"

    @classmethod
    def named(cls, name: str) -> Case:
        """Return the case of a name."""
        fault, parallel, seed = name.split("/")
        return cls(fault, Sizes(*map(int, re.findall(r"\d+", parallel))), int(seed))

    def plan(self) -> Plan:
        """Return the job: its manner of training follows from the seed."""
        fault, _, several = self.fault.partition(" x")
        ranks = tuple(sorted(Random(self.seed).sample(range(self.sizes.world_size), int(several)))) if several else None
        return Plan(
            sizes=self.sizes,
            injections=(Injection(fault, ranks),),
            schedule=Schedule(batched=self.seed % 2 == 0, p2p_sync=self.seed // 2 % 2 == 0),
            recorder=Recorder(timing=self.seed % _TIMED_EVERY == 0),
            ranks_per_node=min(8, self.sizes.world_size // 2),
            seed=self.seed,
        )


def score(truth: Truth, answer: Answer) -> Score:
    """Compare an answer with the truth.

    Exact: all ranks that a right answer must name, and none that it may not; somebody, where something hangs.
    Contained: all that it must name, or one that it may where dumps do not decide.
    """
    named, required, allowed = answer.suspects, frozenset(truth.required), frozenset(truth.allowed)
    if truth.verdict == "healthy":
        is_right = answer.verdict == "healthy" and not named
        contained = exact = cause = group = is_right
    else:
        contained = required <= named if required else bool(named & allowed)
        exact = contained and named <= allowed
        cause = not answer.causes.isdisjoint(truth.causes)
        group = not answer.hung_groups.isdisjoint(call.process_group for call in truth.hung)
    return Score(
        exact=exact,
        contained=contained,
        cause=cause,
        group=group,
        false_alarm=truth.verdict == "healthy" and answer.verdict == "hang",
        crashed=answer.crashed is not None,
        seconds=answer.seconds,
    )


def tools() -> list[Tool]:
    """Return the tools that can be asked."""
    return [tool for tool in TOOLS if tool.version is not None]


def write_dumps(job: Job, directory: Path) -> None:
    """Write what each rank dumps, with the mtimes that the files would have."""
    for rank, moment_ns in job.moments.items():
        path = directory / f"{PREFIX}{rank}"
        path.write_bytes(formats.to_pickle(job.dump(rank, EPOCH_NS)))
        os.utime(path, ns=(EPOCH_NS + moment_ns,) * 2)


def measure(case: Case) -> Scored | None:
    """Simulate one case and ask every tool; None where the fault cannot befall such a job."""
    try:
        job = simulate(case.plan())
    except UsageError:
        return None
    directory = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))  # noqa: S108
    try:
        write_dumps(job, directory)
        answers = {tool.name: tool.ask(directory, PREFIX) for tool in tools()}
    finally:
        shutil.rmtree(directory)
    scores = {name: score(job.truth, answer) for name, answer in answers.items()}
    said = {name: _words(answer) for name, answer in answers.items()}
    return Scored(case.name, case.fault, job.truth, scores, said)


def _words(answer: Answer) -> str:
    if answer.crashed is not None:
        return f"crashed: {answer.crashed}"
    causes = ", ".join(sorted(answer.causes))
    return f"{answer.verdict}, ranks {sorted(answer.suspects)}, groups {sorted(answer.hung_groups)}, {causes}"


def cases(faults: Sequence[str]) -> Iterator[Case]:
    """Yield the grid."""
    for sizes, seeds in GRID:
        for fault in faults:
            for seed in range(seeds):
                yield Case(fault, sizes, seed)


def main() -> None:
    """Measure, print, and write the documentation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", metavar="NAME")
    parser.add_argument("--faults", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--limit", type=int, help="no more sets than this; nothing is written")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    if arguments.show is not None:
        show(Case.named(arguments.show))
        return
    chosen = list(cases(arguments.faults))[: arguments.limit]
    scored: list[Scored] = []
    # Another start method than fork: torch has threads.
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        for number, found in enumerate(pool.map(measure, chosen), 1):
            if found is not None:
                scored.append(found)
            if number % 50 == 0:
                print(f"{number} of {len(chosen)} sets", file=sys.stderr)
    report = render(scored, [f"{tool.name} {tool.version}" for tool in tools()])
    print(report)
    if arguments.limit is None and arguments.faults == KINDS:
        publish(report, DOCS / "accuracy.md")
        draw(scored, DOCS / "images" / "accuracy.png")


def show(case: Case) -> None:
    """Print one set: the truth, and what each tool says."""
    found = measure(case)
    if found is None:
        sys.exit(f"{case.name}: the fault cannot befall such a job")
    print(json.dumps(found.truth.to_dict(), indent=1))
    for name, words in found.said.items():
        print(f"{name}: {words}")


if __name__ == "__main__":
    main()
