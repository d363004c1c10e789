"""Ask this project and its peers the same question, which ranks made the others wait, and read their answers.

Peers run as released, with their defaults, in this process, and what they print is dropped. Where an answer can be read
in two ways, the reading that helps the peer counts; the docstrings below say which. Importing is not timed. A peer that
cannot be imported has no version:

    pip install torch tabulate
    pip install --no-deps --only-binary :all: --platform manylinux_2_39_x86_64 --target DIR nvidia-resiliency-ext==0.6.0
    export PYTHONPATH=DIR

torch's analyzer calls tabulate where send and recv calls do not pair, and stops with a NameError where it is missing.
NVIDIA's is plain Python and needs none of what its package depends on, nor the glibc that its wheel asks for.
"""

from __future__ import annotations

import ast
import gc
import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any

from fr_exporter.diagnosis import Cause, Verdict

TIMEOUT_S = 60.0

EMPTY: frozenset[Any] = frozenset()

# "This rank is not in this call" says that it is late, and leaves open what keeps it.
NOT_JOINED = frozenset(
    {
        Cause.HOST_STALL,
        Cause.DEVICE_STALL,
        Cause.DESYNC,
        Cause.ORDER_DEADLOCK,
        Cause.P2P_UNMATCHED,
        Cause.MISSING_DUMP,
    }
)

# torch's names for how a rank's call differs from that of the rank it compares with.
MATCH_STATES = {
    "COLLECTIVE_TYPE_MISMATCH": frozenset({Cause.COLLECTIVE_MISMATCH, Cause.DESYNC, Cause.ORDER_DEADLOCK}),
    "SIZE_OR_SYNTAX_MISMATCH": frozenset({Cause.COLLECTIVE_MISMATCH, Cause.DESYNC, Cause.P2P_UNMATCHED}),
    "COLLECTIVE_DTYPE_MISMATCH": frozenset({Cause.COLLECTIVE_MISMATCH}),
    "COLLECTIVE_STATE_MISMATCH": frozenset({Cause.DEVICE_STALL, Cause.HOST_STALL, Cause.COMMUNICATION_FAULT}),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a tool says about one set of dumps.

    `hung_groups` are names of process groups, `causes` all of ours that its words fit. A tool that `crashed` (the
    exception in one line, or "timeout") has no verdict and names nothing.
    """

    suspects: frozenset[int] = EMPTY
    hung_groups: frozenset[str] = EMPTY
    causes: frozenset[Cause] = EMPTY
    verdict: Verdict | None = None
    crashed: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool to compare. `question` gets the module, the directory and the prefix of the dumps' names."""

    name: str
    distributions: tuple[str, ...]
    module: str
    question: Callable[[Any, Path, str], Answer]

    @property
    def version(self) -> str | None:
        """The version of the first distribution; None where the module or a distribution is not there."""
        try:
            import_module(self.module)
            first, *_ = map(version, self.distributions)
        except ImportError:
            return None
        return first

    def ask(self, directory: Path, prefix: str) -> Answer:
        """Return what the tool says about the files `<prefix><rank>` in `directory`. Call it from the main thread."""
        module = import_module(self.module)
        start = time.perf_counter()
        try:
            with _time_limit(TIMEOUT_S), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                answer = self.question(module, directory, prefix)
        except _TimeUp:
            answer = Answer(crashed="timeout")
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a tool does is a result
            answer = Answer(crashed=f"{type(error).__name__}: {error}".split("\n")[0])
        finally:
            gc.enable()  # torch's reader leaves the collector off
        return replace(answer, seconds=time.perf_counter() - start)


def ask_fr_exporter(module: Any, directory: Path, prefix: str) -> Answer:
    """Count all suspects, and of the hung groups the headline alone."""
    diagnosis = module.analyze_dumps(directory / prefix)
    return Answer(
        suspects=frozenset(diagnosis.suspect_ranks),
        hung_groups=frozenset(hung.group.name for hung in diagnosis.hung_process_groups[:1]),
        causes=EMPTY if diagnosis.cause is None else frozenset({diagnosis.cause}),
        verdict=diagnosis.verdict,
    )


def ask_torchfrtrace(module: Any, directory: Path, prefix: str) -> Answer:
    """Read the database that torch's analyzer builds: it holds what the analyzer prints.

    - Where ranks have no dump it stops and names them, unless told `--allow-incomplete-ranks`. They count as its
      suspects, and the groups in which that option shows calls that it cannot match as hung.
    - Else the ranks and groups of its reports count, of each group the first: later pairing, says its source, may be
      wrong.
    - Where there is no report, groups with calls that it cannot match count as hung and as unmatched send and recv. It
      shows those calls under "MISMATCH", for good batches too, and names no rank: no false alarm.
    """
    logging.getLogger("Flight Recorder").setLevel(logging.CRITICAL)
    arguments = module.JobConfig().parse_args([str(directory), f"--prefix={prefix}", "--allow-incomplete-ranks"])
    details, dump_version = module.read_dir(arguments)
    database = module.build_db(details, arguments, dump_version)

    unmatched = frozenset(call.group_id for call in database.ncclcalls if call.collective_id is None)
    dumped = {dump["rank"] for dump in details.values()}
    absent = frozenset(member.global_rank for member in database.memberships) - dumped
    if absent:
        return Answer(absent, unmatched, frozenset({Cause.MISSING_DUMP}), "hang")
    reports: dict[str, Any] = {}
    for collective in database.collectives:
        if collective.missing_ranks or not collective.pass_check:
            reports.setdefault(collective.group_id, collective)
    if not reports:
        return Answer(EMPTY, unmatched, frozenset({Cause.P2P_UNMATCHED}) if unmatched else EMPTY, "healthy")
    suspects, causes = zip(*map(_read_report, reports.values()), strict=True)
    return Answer(EMPTY.union(*suspects), frozenset(reports), EMPTY.union(*causes), "hang")


def _read_report(report: Any) -> tuple[frozenset[int], frozenset[Cause]]:
    """Return the ranks that one report names, and the causes that it fits.

    It takes the first rank it finds for right, and so blames all others where that one is odd, as its source says.
    Where it blames more than half of a group, the rest of the group counts as named instead.
    """
    if report.missing_ranks:
        return frozenset(report.missing_ranks), NOT_JOINED
    if report.input_numel is not None:
        # The sizes of an all_to_all do not add up: it names no rank, and prints the members.
        return frozenset(report.expected_ranks), MATCH_STATES["SIZE_OR_SYNTAX_MISMATCH"]
    blamed = frozenset(report.mismatch_collectives)
    causes = EMPTY.union(
        *(MATCH_STATES[call.type_of_mismatch.state.name] for call in report.mismatch_collectives.values())
    )
    if 2 * len(blamed) > len(report.expected_ranks):
        return frozenset(report.expected_ranks) - blamed, causes
    return blamed, causes


def ask_nvidia(module: Any, directory: Path, prefix: str) -> Answer:
    """Take the ranks from the text `hanging ranks: [...]` and the groups from the rows of the table above it.

    It says no more of a rank than that it is missing. Where it has no row to print, the set counts as healthy to it.
    """
    options = {"fr_path": str(directory), "pattern": f"{prefix}*", "verbose": False, "llm_analyze": False}
    result, _ = module.CollectiveAnalyzer(options).run_sync(options)
    rows = [line for line in result["analysis_text"].splitlines() if "|" in line][1:]
    return Answer(
        suspects=frozenset(ast.literal_eval(result["hanging_ranks"].partition(":")[2].strip())),
        hung_groups=frozenset(row.partition("|")[0].strip() for row in rows),
        causes=NOT_JOINED if rows else EMPTY,
        verdict="hang" if rows else "healthy",
    )


TOOLS = (
    Tool("fr_exporter", ("fr-exporter",), "fr_exporter", ask_fr_exporter),
    Tool("torchfrtrace", ("torch", "tabulate"), "torch.distributed.flight_recorder.fr_trace", ask_torchfrtrace),
    Tool(
        "nvidia_resiliency_ext",
        ("nvidia-resiliency-ext",),
        "nvidia_resiliency_ext.attribution.trace_analyzer.fr_attribution",
        ask_nvidia,
    ),
)


class _TimeUp(BaseException):
    """No Exception: a tool that goes on after any error of a file would go on after this one too."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise _TimeUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
