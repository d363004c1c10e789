"""The library: `analyze_dumps`, and `CollectiveAnalyzer` with the interface of NVIDIA's resiliency extension."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from fr_exporter.config import DEFAULT_PATTERN
from fr_exporter.diagnosis import AttributionState, Diagnosis
from fr_exporter.errors import UsageError
from fr_exporter.model import Scope
from fr_exporter.offline import analyze_path
from fr_exporter.ranges import format_ranges
from fr_exporter.report import render_health, render_ranks, render_sizes, render_table

_OPTIONS = ("fr_path", "pattern", "verbose", "health_check")
_COLUMNS = ("PGID", "Process Group Desc", "Op Type", "Size", "Dtype", "Missing Ranks")


def analyze_dumps(
    path: str | os.PathLike[str],
    *,
    pattern: str = DEFAULT_PATTERN,
    scope: Scope = "job",
    world_size: int | None = None,
    jobs: int | None = 1,
) -> Diagnosis:
    """Return the diagnosis of the dumps that `path` stands for: a directory, one file, or a path prefix.

    In a directory `pattern` selects the dumps; where it finds none the well-known names are tried, and a warning says
    so. `scope` is `node` where the other nodes' ranks dump elsewhere. `world_size` None is taken from the dumps.
    `jobs` is the number of processes to read in; None takes the cores there are where the files are large.

    Raises:
        UsageError: nothing can be read there, or an argument is wrong.
    """
    if not os.fspath(path):
        raise UsageError("the path of the dumps is empty; give a directory, a file or a path prefix")
    if scope not in get_args(Scope):
        raise UsageError(f"scope must be one of {', '.join(get_args(Scope))}, not {scope!r}")
    if world_size is not None and world_size < 1:
        raise UsageError(f"world size must be at least 1, not {world_size}")
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs must be at least 1, not {jobs}")
    return analyze_path(os.fspath(path), pattern=pattern, scope=scope, world_size=world_size, jobs=jobs)


@dataclass(frozen=True, slots=True)
class FRAnalysisResult:
    """What `CollectiveAnalyzer` found.

    `analysis_text` is a table of the hung process groups, `hanging_ranks` a string such as `hanging ranks: [12, 14]`
    that names the suspects.
    """

    analysis_text: str
    hanging_ranks: str
    diagnosis: Diagnosis


class CollectiveAnalyzer:
    """Analyse dumps as a dict of options says.

    Options: `fr_path` (a directory, one file or a path prefix), `pattern` (default `_dump_*`), `verbose` (the text
    also has per-rank tables) and `health_check` (it also has the health checks). Those given to `run` and `run_sync`
    win over those given here. All three raise UsageError.
    """

    def __init__(self, options: Mapping[str, object]) -> None:
        self._options = _checked(options)

    def run_sync(self, options: Mapping[str, object]) -> tuple[FRAnalysisResult, AttributionState]:
        """Return the result, and whether a restart can help."""
        merged = {**self._options, **_checked(options)}
        path = merged.get("fr_path")
        if not isinstance(path, str | os.PathLike):
            raise UsageError("fr_path must say where the dumps are: a directory, a file or a path prefix")
        diagnosis = analyze_dumps(path, pattern=str(merged.get("pattern", DEFAULT_PATTERN)))
        parts = ["\n".join(_hung_groups(diagnosis))]
        if merged.get("health_check"):
            parts.append(render_health(diagnosis))
        if merged.get("verbose"):
            parts.append(render_ranks(diagnosis))
        result = FRAnalysisResult(
            analysis_text="\n\n".join(parts),
            hanging_ranks=f"hanging ranks: {diagnosis.suspect_ranks}",
            diagnosis=diagnosis,
        )
        return result, diagnosis.attribution_state

    async def run(self, options: Mapping[str, object]) -> tuple[FRAnalysisResult, AttributionState]:
        """Return what `run_sync` does, worked out in a thread so that the event loop goes on."""
        import asyncio  # noqa: PLC0415  the command line would pay 30 ms for what only a running event loop needs

        return await asyncio.to_thread(self.run_sync, options)


def _checked(options: Mapping[str, object]) -> Mapping[str, object]:
    for key in options:
        if key not in _OPTIONS:
            raise UsageError(f"unknown option {key!r}: known are {', '.join(_OPTIONS)}")
    return options


def _hung_groups(diagnosis: Diagnosis) -> list[str]:
    rows = [
        (
            hung.group.name,
            hung.group.desc,
            hung.operation,
            render_sizes(hung.input_sizes),
            ", ".join(hung.dtypes),
            format_ranges(hung.waiting_on),
        )
        for hung in diagnosis.hung_process_groups
    ]
    return render_table(_COLUMNS, rows, separator=" | ")
