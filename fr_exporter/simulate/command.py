"""`fr-exporter simulate`: a drill. Everything is checked before anything is written."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

from fr_exporter.errors import UsageError
from fr_exporter.ranges import name_ranks
from fr_exporter.simulate import formats
from fr_exporter.simulate.faults import FAULTS
from fr_exporter.simulate.job import Injection, Job, Plan, simulate
from fr_exporter.simulate.layout import MAX_RANKS, Sizes
from fr_exporter.simulate.program import Schedule
from fr_exporter.simulate.recorder import Recorder
from fr_exporter.simulate.truth import Truth
from fr_exporter.simulate.writer import DEFAULT_PREFIX, FORMATS, TRUTH, Output, check_directory, write_job
from fr_exporter.text import printable

DESCRIPTION = (
    "Write the flight-recorder dumps of a simulated training job with faults, and the truth about it: a drill for "
    "dashboards and paging. Exit code: 0 written, 2 wrong usage and nothing written, 4 cannot write."
)

_DEFAULT_DATA = 4
# Ranks of a larger job do less each, so that it is written in minutes.
_LARGE = 2048
_SHORT = Schedule(steps=3, layers=1, microbatches=4)
# More than `dump_set.window`, so that each round is a dump set of its own.
_ROUND_S = 150.0
_DAY_S = 86_400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `run` takes."""
    parser.add_argument("out", metavar="OUT", help="the directory to write to; made where it does not exist")
    faults = parser.add_argument_group("fault")
    faults.add_argument(
        "--fault",
        metavar="NAME[:RANKS]",
        dest="faults",
        action="append",
        help="what goes wrong, and on which ranks (as 3,7 or 0-2; default: one by the seed); again for several faults; "
        f"one of {', '.join(FAULTS)} (default: host_stall)",
    )
    faults.add_argument("--seed", metavar="N", type=int, default=0, help="another seed, another job (default: 0)")
    sizes = parser.add_argument_group("job", f"of at most {MAX_RANKS} ranks: tensor × pipeline × context × data")
    sizes.add_argument("--tensor", metavar="N", type=_positive, default=2, help="(default: %(default)s)")
    sizes.add_argument("--pipeline", metavar="N", type=_positive, default=2, help="(default: %(default)s)")
    sizes.add_argument("--context", metavar="N", type=_positive, default=1, help="(default: %(default)s)")
    sizes.add_argument(
        "--data", metavar="N", type=_positive, help=f"(default: {_DEFAULT_DATA}, or what --world-size asks for)"
    )
    sizes.add_argument(
        "--expert", metavar="N", type=_positive, default=1, help="divides data × context (default: %(default)s)"
    )
    sizes.add_argument("--world-size", metavar="N", type=_positive, help="ranks of the job (default: by the sizes)")
    sizes.add_argument(
        "--ranks-per-node", metavar="N", type=_positive, default=8, help="(default: %(default)s; for node_lost)"
    )
    recorder = parser.add_argument_group("recorder")
    recorder.add_argument(
        "--ring", metavar="N", type=_positive, default=2000, help="entries that a rank keeps (default: %(default)s)"
    )
    recorder.add_argument("--only-active", action="store_true", help="leave completed calls out")
    recorder.add_argument("--timing", action="store_true", help="note when calls start")
    recorder.add_argument("--no-frames", action="store_true", help="leave stack frames out")
    files = parser.add_argument_group("files")
    files.add_argument("--format", choices=FORMATS, default="pickle", help="(default: %(default)s)")
    files.add_argument(
        "--dump-version", choices=formats.VERSIONS, default="2.10", help="as torch wrote it then (default: %(default)s)"
    )
    files.add_argument("--prefix", default=DEFAULT_PREFIX, help="what stands before the rank (default: %(default)s)")
    files.add_argument(
        "--write-delay", metavar="SECONDS", type=_seconds, default=0.0, help="between one file and the next"
    )
    files.add_argument(
        "--follow",
        metavar="SECONDS",
        type=_seconds,
        nargs="?",
        const=_ROUND_S,
        help="go on until Ctrl-C: a healthy job's dumps, SECONDS later those of the fault, and so on "
        f"(default: {_ROUND_S:g})",
    )
    files.add_argument("--force", action="store_true", help="write into a directory that is not empty")


def run(
    arguments: argparse.Namespace,
    *,
    write: Callable[[str], object],
    clock: Callable[[], int],
    sleep: Callable[[float], object],
) -> None:
    """Write what is asked for, and say what it is; with `--follow`, until a KeyboardInterrupt.

    `clock` gives nanoseconds since the epoch, `sleep` takes seconds.

    Raises:
        UsageError: the arguments ask for what cannot be; nothing was written.
        FRExporterError: a file cannot be written.
    """
    output = _output(arguments)
    plan = _plan(arguments)
    check_directory(output.directory, force=arguments.force)
    job = simulate(plan)

    def carry_out(job: Job) -> None:
        write_job(job, output, clock=clock, sleep=sleep)
        write(_told(job, output))

    if arguments.follow is None:
        carry_out(job)
        write(f"Try: {_analyze_command(output)}\n")
        return
    write(f"Healthy dumps and those of the fault in turn, every {arguments.follow:g} s. Ctrl-C ends it.\n")
    with suppress(KeyboardInterrupt):
        for each in _rounds(plan):
            carry_out(each)
            sleep(arguments.follow)


def _rounds(plan: Plan) -> Iterator[Job]:
    """Yield a healthy job and one with the faults in turn, each pair with a seed of its own: another incident."""
    for seed in count(plan.seed):
        for injections in ((Injection("healthy"),), plan.injections):
            yield simulate(replace(plan, injections=injections, seed=seed))


def _output(arguments: argparse.Namespace) -> Output:
    if not arguments.out:
        raise UsageError("the path of the directory to write to is empty")
    return Output(
        directory=Path(arguments.out),
        prefix=arguments.prefix,
        format=arguments.format,
        version=arguments.dump_version,
        write_delay_s=arguments.write_delay,
    )


def _plan(arguments: argparse.Namespace) -> Plan:
    sizes = Sizes(
        tensor=arguments.tensor,
        pipeline=arguments.pipeline,
        data=_data_size(arguments),
        expert=arguments.expert,
        context=arguments.context,
    )
    recorder = Recorder(
        ring=arguments.ring,
        only_active=arguments.only_active,
        timing=arguments.timing,
        frames=not arguments.no_frames,
    )
    return Plan(
        sizes,
        tuple(_injection(text, sizes.world_size) for text in arguments.faults or ["host_stall"]),
        schedule=Schedule() if sizes.world_size <= _LARGE else _SHORT,
        recorder=recorder,
        ranks_per_node=arguments.ranks_per_node,
        seed=arguments.seed,
    )


def _data_size(arguments: argparse.Namespace) -> int:
    """Return the data-parallel size that is given, or that makes the world size."""
    data: int | None = arguments.data
    if arguments.world_size is None:
        return _DEFAULT_DATA if data is None else data
    others = arguments.tensor * arguments.pipeline * arguments.context
    if data is not None and data * others != arguments.world_size:
        raise UsageError(f"--world-size {arguments.world_size}: the sizes given make {data * others} ranks")
    if arguments.world_size % others:
        raise UsageError(
            f"--world-size {arguments.world_size}: is not divisible by tensor × pipeline × context = {others}"
        )
    return int(arguments.world_size // others)


def _injection(text: str, world_size: int) -> Injection:
    name, colon, ranks = text.partition(":")
    return Injection(name, _ranks(ranks, world_size) if colon else None)


def _ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Return the ranks of ranges such as `3,7` or `0-2`, in order and each once."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            begin, end = int(first), int(last if dash else first)
        except ValueError:
            raise UsageError(f"ranks {text!r}: write them as 3,7 or 0-2") from None
        if not begin <= end < world_size:
            raise UsageError(f"ranks {text!r}: {part} is no range of ranks in a job of {world_size}")
        found.update(range(begin, end + 1))
    return tuple(sorted(found))


def _told(job: Job, output: Output) -> str:
    """Return what was written and what is true of it, a line each."""
    truth = job.truth
    written = (
        f"{output.directory}: {len(job.moments)} dumps of {truth.world_size} ranks (seed {truth.seed}), and {TRUTH}"
    )
    lines = [written, *(_hang_words(truth) if truth.verdict == "hang" else ["Nothing hangs."])]
    return "".join(f"{printable(line)}\n" for line in lines)


def _hang_words(truth: Truth) -> Iterator[str]:
    faults = ", ".join(f"{fault.name} on {_named(fault.ranks)}" for fault in truth.faults)
    call, *others = truth.hung
    operation = "send/recv" if call.kind == "p2p" else call.operation
    more = f", and in {len(others)} more, which {TRUTH} lists" if others else ""
    yield f"Hang by {faults}: in {operation} {call.seq_id} of process group {call.process_group} ({call.desc}){more}."
    named = f"names {_named(truth.required)}" if truth.required else f"names some of {_named(truth.allowed)}"
    limit = f", and none but {_named(truth.allowed)}" if () != truth.required != truth.allowed else ""
    yield f"A right verdict {named}{limit}."
    if truth.note:
        yield f"Dumps cannot tell more: {truth.note}."


def _named(ranks: Iterable[int]) -> str:
    return name_ranks(ranks, max_length=60)


def _analyze_command(output: Output) -> str:
    command = ["fr-exporter", "analyze", str(output.directory)]
    if output.prefix != DEFAULT_PREFIX:
        command.append(f"--pattern={output.prefix}*")
    return shlex.join(command)


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, not {text!r}")
    return number


def _seconds(text: str) -> float:
    """Return a time span that a timer takes."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _DAY_S:
        raise argparse.ArgumentTypeError(f"must be 0 to {_DAY_S:g} seconds, not {text!r}")
    return seconds
