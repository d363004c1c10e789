"""Random jobs: what each rank issues, when, and when each call completes, worked out from what completion needs.

All ranks follow one global order of calls, each issuing those that it takes part in. So nothing can deadlock: where a
job hangs, it hangs for the fault put into it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from fr_exporter.simulate import Schedule, Sizes
from tests.builders import SECOND, START_NS, Dump, Group, Job

MILLISECOND = SECOND // 1000
NEVER = 1 << 62


@dataclass(frozen=True)
class Call:
    """A collective of a group, or a send from one of its members to another, with its recv."""

    group: int
    operation: str
    peers: tuple[int, int] | None = None


@dataclass(frozen=True)
class Program:
    """What a job does. `group 0` is the world.

    `blocks`: the host of a rank waits for each call before it issues the next. `one_stream`: a rank's device runs its
    calls in the order of issue, whatever their group. `pace` is how long a rank's host computes between two calls.
    `stops`: a rank's host stops for good before its n-th call.
    """

    groups: tuple[tuple[int, ...], ...]
    calls: tuple[Call, ...]
    blocks: tuple[bool, ...]
    one_stream: bool
    pace_ns: tuple[int, ...]
    stops: tuple[tuple[int, int], ...] = ()

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.groups[0])

    def takes_part(self, call: Call) -> tuple[int, ...]:
        """Return the ranks that issue a call."""
        return self.groups[call.group] if call.peers is None else call.peers

    def relabelled(self, names: Sequence[int]) -> Program:
        """Return the same job with rank r called `names[r]`."""
        inverse = sorted(range(self.world_size), key=names.__getitem__)
        return replace(
            self,
            groups=(self.groups[0], *(tuple(names[rank] for rank in group) for group in self.groups[1:])),
            calls=tuple(
                call if call.peers is None else replace(call, peers=(names[call.peers[0]], names[call.peers[1]]))
                for call in self.calls
            ),
            blocks=tuple(self.blocks[rank] for rank in inverse),
            pace_ns=tuple(self.pace_ns[rank] for rank in inverse),
            stops=tuple((names[rank], before) for rank, before in self.stops),
        )


@dataclass(frozen=True)
class Timeline:
    """When each call was issued by each rank that got so far, and when it was complete, by its place in the program."""

    issued: tuple[Mapping[int, int], ...]
    completed: tuple[int, ...]

    @property
    def end_ns(self) -> int:
        """The time of the last thing that happened."""
        moments = [moment for call in self.issued for moment in call.values()]
        return max([START_NS, *moments, *(moment for moment in self.completed if moment < NEVER)])


def run(program: Program) -> Timeline:
    """Run a program: a call completes once all who take part have issued it and their devices have reached it."""
    stops = dict(program.stops)
    now = [START_NS] * program.world_size
    issued_calls = [0] * program.world_size
    ready: dict[object, int] = {}
    issued: list[dict[int, int]] = []
    completed: list[int] = []
    for call in program.calls:
        ranks = program.takes_part(call)
        moments = {}
        for rank in ranks:
            if stops.get(rank) == issued_calls[rank]:
                now[rank] = NEVER
            if now[rank] < NEVER:
                moments[rank] = now[rank] = now[rank] + program.pace_ns[rank]
                issued_calls[rank] += 1
        streams: list[object] = [call.group if call.peers is None else (call.group, *call.peers)]
        streams += [("device", rank) for rank in ranks if program.one_stream]
        arrived = len(moments) == len(ranks)
        reached = max([ready.get(stream, 0) for stream in streams])
        done = max(reached, *moments.values()) + MILLISECOND if arrived and reached < NEVER else NEVER
        ready.update(dict.fromkeys(streams, done))
        for rank in ranks:
            if program.blocks[rank]:
                now[rank] = max(now[rank], done)
        issued.append(moments)
        completed.append(done)
    return Timeline(tuple(issued), tuple(completed))


def dumps_at(
    program: Program, moments: Mapping[int, int], *, flipped: frozenset[tuple[int, int]] = frozenset()
) -> dict[int, Dump]:
    """Return what each rank dumps at its moment; a `flipped` (call, rank) shows the opposite of its completion."""
    timeline = run(program)
    job = Job(program.world_size)
    groups = [job.world, *(job.group(str(n), f"group {n}", ranks) for n, ranks in enumerate(program.groups) if n)]
    for index, call in enumerate(program.calls):
        for rank, issued_ns in timeline.issued[index].items():
            if issued_ns <= moments[rank]:
                job.now_ns = issued_ns
                done = timeline.completed[index] <= moments[rank]
                _issue(job, groups[call.group], call, rank, done=done != ((index, rank) in flipped))
    return job.dumps()


def _issue(job: Job, group: Group, call: Call, rank: int, *, done: bool) -> None:
    if call.peers is None:
        job.collective(group, call.operation, by=[rank], done=done)
    elif rank == call.peers[0]:
        job.send(group, *call.peers, done=done)
    else:
        job.recv(group, rank, call.peers[0], done=done)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Jobs of 2 to 7 ranks with up to four groups and up to 25 calls, sends among them."""
    world_size = draw(st.integers(2, 7))
    world = tuple(range(world_size))
    members = st.lists(st.sampled_from(world), min_size=2, unique=True).map(tuple)
    groups = (world, *draw(st.lists(members, max_size=4)))
    return Program(
        groups=groups,
        calls=tuple(draw(st.lists(_calls(groups), min_size=1, max_size=25))),
        blocks=tuple(draw(st.lists(st.booleans(), min_size=world_size, max_size=world_size))),
        one_stream=draw(st.booleans()),
        pace_ns=tuple(
            draw(
                st.lists(st.integers(1, 80), min_size=world_size, max_size=world_size).map(
                    lambda paces: [pace * MILLISECOND for pace in paces]
                )
            )
        ),
    )


@st.composite
def _calls(draw: st.DrawFn, groups: tuple[tuple[int, ...], ...]) -> Call:
    group = draw(st.integers(0, len(groups) - 1))
    if draw(st.integers(0, 3)) == 0:
        source, destination = draw(st.permutations(groups[group]))[:2]
        return Call(group, "send", (source, destination))
    return Call(group, draw(st.sampled_from(["all_reduce", "_all_gather_base", "broadcast", "all_to_all"])))


@st.composite
def stalled_programs(draw: st.DrawFn) -> tuple[Program, int]:
    """Programs in which the host of one rank stops before one of its calls, and that rank."""
    program = draw(programs())
    shares = [sum(rank in program.takes_part(call) for call in program.calls) for rank in range(program.world_size)]
    rank = draw(st.sampled_from([rank for rank, share in enumerate(shares) if share]))
    return replace(program, stops=((rank, draw(st.integers(0, shares[rank] - 1))),)), rank


@st.composite
def scrambled_dumps(draw: st.DrawFn) -> tuple[Program, dict[int, int], frozenset[tuple[int, int]]]:
    """Programs with stops and impossible completions, and the moments of their dumps: evidence of any kind."""
    program = draw(programs())
    ranks = st.sampled_from(range(program.world_size))
    stops = draw(st.lists(st.tuples(ranks, st.integers(0, 10)), max_size=2))
    flipped = draw(st.frozensets(st.tuples(st.integers(0, len(program.calls) - 1), ranks), max_size=4))
    program = replace(program, stops=tuple(stops))
    end_ns = run(program).end_ns + 60 * SECOND
    return program, dict.fromkeys(range(program.world_size), end_ns), flipped


@st.composite
def job_sizes(draw: st.DrawFn) -> Sizes:
    """Draw the sizes of a job of 2 to 32 ranks."""
    tensor, pipeline, data, context = (draw(st.integers(1, most)) for most in (3, 4, 4, 3))
    if not 2 <= tensor * pipeline * data * context <= 32:
        pipeline, data, context = 1, 2, 1
    expert = draw(st.sampled_from([size for size in range(1, 13) if data * context % size == 0]))
    return Sizes(tensor=tensor, pipeline=pipeline, data=data, expert=expert, context=context)


schedules = st.builds(
    Schedule,
    steps=st.integers(2, 3),
    layers=st.integers(1, 2),
    microbatches=st.none() | st.integers(1, 4),
    batched=st.booleans(),
    p2p_sync=st.booleans(),
)
