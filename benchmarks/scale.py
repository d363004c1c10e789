"""Measure how time and memory of `fr-exporter analyze` grow with ranks and with calls, beside torch's own analyzer.

    python benchmarks/scale.py [--rounds N]      (needs torch and matplotlib; 3 GB of disk, half an hour)

Prints the figures of docs/performance.md as a table, and draws docs/images/scale.png. Every tool runs as a process of
its own on the same files, first once with its memory watched, which also brings the files into the page cache, then in
turn with the others; medians count. A tool that finishes without naming the stalled rank ends the benchmark.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dumps import STALLED_RANK, write_world_set
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from performance import BARE_LOOP
from processes import run

TIMEOUT_S = 300.0
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "scale.png"


class Size(NamedTuple):
    """How large a set is."""

    ranks: int
    calls: int


BY_RANKS = tuple(Size(ranks, 20) for ranks in (64, 256, 1_024, 4_096, 16_384))
BY_CALLS = tuple(Size(256, calls) for calls in (20, 200, 2_000))


@dataclass(frozen=True, slots=True)
class Tool:
    """A program to measure: what to put before the directory, and how its right answer shows."""

    name: str
    color: str
    arguments: tuple[str, ...]
    returncode: int
    answer: str

    def measure(self, directory: Path, *, watch_memory: bool = False) -> tuple[float, int]:
        """Return the seconds of one run, infinity where it was stopped, and its peak memory where that is watched."""
        done = run([sys.executable, *self.arguments, str(directory)], TIMEOUT_S, watch_memory=watch_memory)
        if done.returncode is None:
            return math.inf, done.peak_bytes
        if done.returncode != self.returncode or self.answer not in done.output:
            sys.exit(f"{self.name}: wrong answer, exit code {done.returncode}\n{done.output}")
        return done.seconds, done.peak_bytes


LOOP = Tool("pickle.load loop", "#777777", ("-c", BARE_LOOP), 0, "")
ANALYZE = Tool(
    "fr-exporter analyze",
    "#0072b2",
    ("-m", "fr_exporter", "analyze"),
    1,
    f"Rank {STALLED_RANK} stopped issuing calls",
)
TORCH = Tool(
    "torchfrtrace",
    "#d55e00",
    ("-m", "torch.distributed.flight_recorder.fr_trace"),
    0,
    f"missing ranks: {{{STALLED_RANK}}}",
)
TOOLS = (LOOP, ANALYZE, TORCH)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a tool takes for a set: the seconds of all rounds, the bytes at its peak."""

    seconds: list[float]
    peak_bytes: int

    @property
    def median_s(self) -> float:
        """The median; infinite where the tool was stopped."""
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        memory = f"{self.peak_bytes / 1e6:.0f} MB"
        if math.isinf(self.median_s):
            return f"not finished in {TIMEOUT_S:.0f} s, {memory} until then"
        return f"{self.median_s:.2f} s ({min(self.seconds):.2f} to {max(self.seconds):.2f}), {memory}"


Costs = Mapping[tuple[Size, Tool], Cost]


def main() -> None:
    """Print the table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        sizes = dict.fromkeys(BY_RANKS + BY_CALLS)
        directories = {size: Path(name) / f"{size.ranks}x{size.calls}" for size in sizes}
        file_bytes = {size: write_world_set(directory, *size) for size, directory in directories.items()}
        costs = measure(directories, arguments.rounds)
    print_table(file_bytes, costs)
    print_growth(costs)
    draw(costs)


def measure(directories: Mapping[Size, Path], rounds: int) -> Costs:
    """Measure every tool on every set, in rounds; what did not finish the first time is not tried again."""
    costs = {}
    for size, directory in directories.items():
        for tool in TOOLS:
            seconds, peak_bytes = tool.measure(directory, watch_memory=True)
            costs[size, tool] = Cost([seconds] if math.isinf(seconds) else [], peak_bytes)
    finishing = [(size, tool) for (size, tool), cost in costs.items() if not cost.seconds]
    for _ in range(rounds):
        for size, tool in finishing:
            seconds, _ = tool.measure(directories[size])
            costs[size, tool].seconds.append(seconds)
    return costs


def print_table(file_bytes: Mapping[Size, int], costs: Costs) -> None:
    """Print a row for each set: seconds and peak memory of each tool."""
    print(f"| ranks | calls a rank | files | {' | '.join(tool.name for tool in TOOLS)} |")
    print("|---|---|---|---|---|---|")
    for size, written in file_bytes.items():
        cells = " | ".join(str(costs[size, tool]) for tool in TOOLS)
        print(f"| {size.ranks:,} | {size.calls:,} | {written / 1e6:.0f} MB | {cells} |")


def print_growth(costs: Costs) -> None:
    """Print how far `analyze` is from growing in line with the ranks."""
    small, large = Size(1_024, 20), Size(16_384, 20)
    times = costs[large, ANALYZE].median_s / costs[small, ANALYZE].median_s
    print(
        f"\n{large.ranks // small.ranks} times the ranks ({small.ranks:,} to {large.ranks:,}) take analyze"
        f" {times:.1f} times as long, {times * small.ranks / large.ranks:.2f} times linear."
    )


def draw(costs: Costs) -> None:
    """Draw time and memory against ranks and against calls."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    figure.suptitle("One group of all ranks, the last 20 calls open, one host stalled")
    panels = figure.subplots(2, 2, sharex="col", sharey="row")
    by_ranks = [(size.ranks, size) for size in BY_RANKS]
    by_calls = [(size.calls, size) for size in BY_CALLS]
    for tool in TOOLS:
        for (time_axes, memory_axes), points in zip(panels.T, (by_ranks, by_calls), strict=True):
            own = [(count, costs[size, tool]) for count, size in points]
            _plot(time_axes, tool, [(count, min(cost.median_s, TIMEOUT_S), cost) for count, cost in own])
            _plot(memory_axes, tool, [(count, cost.peak_bytes / 1e6, cost) for count, cost in own])
    panels[0, 0].set_ylabel("seconds, whole process")
    panels[1, 0].set_ylabel("peak memory in MB, all processes")
    panels[1, 0].set_xlabel(f"ranks, with {BY_RANKS[0].calls} calls each")
    panels[1, 1].set_xlabel(f"calls a rank, with {BY_CALLS[0].ranks} ranks")
    panels[0, 0].legend(loc="upper left")
    figure.savefig(PICTURE, dpi=120)


def _plot(axes: Axes, tool: Tool, points: list[tuple[int, float, Cost]]) -> None:
    """Draw one line; a hollow arrow says that the true value is larger, since the tool was stopped."""
    counts = [count for count, _, _ in points]
    axes.loglog(counts, [value for _, value, _ in points], "o-", color=tool.color, label=tool.name)
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    for count, value, cost in points:
        if math.isinf(cost.median_s):
            axes.plot(count, value, "^", color=tool.color, markerfacecolor="white", markersize=12, zorder=3)
            axes.annotate(
                f"stopped after {TIMEOUT_S:.0f} s", (count, value), (-10, -3), textcoords="offset points", ha="right"
            )


if __name__ == "__main__":
    main()
