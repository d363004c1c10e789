"""A job from its sizes and faults to what every rank dumps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from fr_exporter.errors import UsageError
from fr_exporter.simulate import engine, truth
from fr_exporter.simulate.aftermath import Aftermath
from fr_exporter.simulate.engine import Outcome
from fr_exporter.simulate.faults import FAULTS, Fault
from fr_exporter.simulate.layout import Group, Layout, Sizes
from fr_exporter.simulate.program import Item, Program, Schedule, write_program
from fr_exporter.simulate.recorder import TIMEOUT_NS, Dump, Recorder
from fr_exporter.simulate.truth import Injected, Truth

# A fault that a place in the program does not bring to a hang is tried at others.
_TRIES = 20
_SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Injection:
    """A fault to inject by name; `ranks` None leaves the choice to the seed."""

    fault: str
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The job to simulate: equal plans give equal jobs. `ranks_per_node` consecutive ranks share a node."""

    sizes: Sizes
    injections: tuple[Injection, ...] = (Injection("host_stall"),)
    schedule: Schedule = field(default_factory=Schedule)
    recorder: Recorder = field(default_factory=Recorder)
    ranks_per_node: int = 8
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """A job that ran. `moments` are when each rank that can dumps, nanoseconds since the job's start."""

    plan: Plan
    layout: Layout
    outcome: Outcome
    truth: Truth
    moments: Mapping[int, int]

    def dump(self, rank: int, epoch_ns: int) -> Dump:
        """Return a rank's dump as a dict of version 2.10; the job started at `epoch_ns`, nanoseconds."""
        groups = self.layout.groups_of[rank].values()
        local_ids: dict[Group, int] = {group: number for number, group in enumerate(groups)}
        return self.plan.recorder.dump(self.outcome.runs[rank], local_ids, self.moments[rank], epoch_ns)


def simulate(plan: Plan) -> Job:
    """Run a job with its faults.

    Raises:
        UsageError: a fault, a rank or a node does not exist, or fits nowhere in this job.
    """
    _check(plan)
    layout = Layout(plan.sizes)
    programs = [
        write_program(layout, rank, plan.schedule, Random(f"{plan.seed} {rank}"))
        for rank in range(plan.sizes.world_size)
    ]
    random = Random(str(plan.seed))
    should_hang = any(FAULTS[injection.fault].hangs for injection in plan.injections)
    for _ in range(_TRIES):
        edited, injected = _inject(programs, plan, random)
        outcome = engine.run(edited)
        if not any(run.leaves_dump for run in outcome.runs):
            raise UsageError(f"{_names(plan)} leaves no rank that could dump; let fewer die")
        if outcome.hangs == should_hang:
            faulty = frozenset(rank for fault in injected if FAULTS[fault.name].hangs for rank in fault.ranks)
            aftermath = Aftermath.of(layout, outcome, faulty, timing=plan.recorder.timing)
            told = truth.tell(aftermath, injected, plan.seed)
            return Job(plan, layout, outcome, told, _moments(outcome, random))
    raise UsageError(f"{_names(plan)} does not hang a job of these sizes; try another fault, other sizes or ranks")


def _names(plan: Plan) -> str:
    return ", ".join(injection.fault for injection in plan.injections)


def _check(plan: Plan) -> None:
    world_size = plan.sizes.world_size
    for injection in plan.injections:
        if injection.fault not in FAULTS:
            raise UsageError(f"unknown fault {injection.fault!r}; choose from {', '.join(FAULTS)}")
        for rank in injection.ranks or ():
            if not 0 <= rank < world_size:
                raise UsageError(f"{injection.fault}: there is no rank {rank} in a job of {world_size}")
    if plan.ranks_per_node < 1:
        raise UsageError(f"a node holds at least 1 rank, not {plan.ranks_per_node}")
    if any(FAULTS[injection.fault].whole_node for injection in plan.injections) and plan.ranks_per_node >= world_size:
        raise UsageError(f"all {world_size} ranks are on the one node that would be lost; use fewer ranks per node")


def _inject(programs: Sequence[Program], plan: Plan, random: Random) -> tuple[list[Sequence[Item]], list[Injected]]:
    """Edit the programs, each fault at a random place of the step before the last."""
    edited: list[Sequence[Item]] = [program.items for program in programs]
    injected: list[Injected] = []
    for injection in plan.injections:
        fault = FAULTS[injection.fault]
        places = _places(fault, injection.ranks, programs, edited, random)
        if fault.whole_node:
            places = _spread_over_nodes(places, programs, plan)
        for rank, index in places.items():
            items = list(edited[rank])
            fault.edit(items, index)
            edited[rank] = items
        injected.append(Injected(fault.name, tuple(sorted(places))))
    return edited, injected


def _places(
    fault: Fault,
    ranks: Sequence[int] | None,
    programs: Sequence[Program],
    edited: Sequence[Sequence[Item]],
    random: Random,
) -> dict[int, int]:
    """Return an index in the program of each rank, or of the first that fits where the ranks are open."""
    found: dict[int, int] = {}
    for rank in ranks if ranks is not None else random.sample(range(len(programs)), len(programs)):
        first, end = programs[rank].steps[-2:]
        fitting = [index for index in range(first, end) if fault.fits(edited[rank], index)]
        if fitting:
            found[rank] = random.choice(fitting)
            if ranks is None:
                return found
        elif ranks is not None:
            raise UsageError(f"{fault.name} cannot befall rank {rank}: {fault.summary}, and it issues no such call")
    if not found:
        raise UsageError(
            f"{fault.name} cannot befall a job of these sizes: {fault.summary}, and none issues such a call"
        )
    return found


def _spread_over_nodes(places: Mapping[int, int], programs: Sequence[Program], plan: Plan) -> dict[int, int]:
    """Let a fault befall the whole node of each rank at the same place of the step, as far as the steps are alike."""
    spread: dict[int, int] = {}
    for rank, index in places.items():
        offset = index - programs[rank].steps[-2]
        first = rank - rank % plan.ranks_per_node
        for neighbour in range(first, min(first + plan.ranks_per_node, len(programs))):
            begin, end = programs[neighbour].steps[-2:]
            spread[neighbour] = min(begin + offset, end - 1)
    return spread


def _moments(outcome: Outcome, random: Random) -> dict[int, int]:
    """Return when each rank dumps: after the watchdog's timeout, or within a fifth of the run where nothing hangs."""
    dumping = [run for run in outcome.runs if run.leaves_dump]
    fronts = [front.issued_ns for run in dumping if (front := run.front) is not None]
    if fronts:
        timeout_ns = min(fronts) + TIMEOUT_NS
        return {run.rank: timeout_ns + random.randrange(3 * _SECOND_NS) for run in dumping}
    end_ns = min(run.host_ns for run in dumping)
    first_ns, skew_ns = end_ns // 2 + random.randrange(end_ns // 4), min(end_ns // 5, 3 * _SECOND_NS)
    return {run.rank: first_ns + random.randrange(skew_ns) for run in dumping}
