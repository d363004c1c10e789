"""Turn scores into the tables and the picture of docs/accuracy.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from fr_exporter.simulate import Truth

OURS = "fr_exporter"

# Between these lines of the page stands what is measured.
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


@dataclass(frozen=True, slots=True)
class Score:
    """How one answer compares with the truth."""

    exact: bool
    contained: bool
    cause: bool
    group: bool
    false_alarm: bool
    crashed: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Scored:
    """One set, and by tool its score and what it said in words."""

    name: str
    fault: str
    truth: Truth
    scores: Mapping[str, Score]
    said: Mapping[str, str]

    @property
    def row(self) -> str:
        """The row of the tables that the set counts in."""
        return self.fault if self.truth.decidable else f"{self.fault}, not decidable"


_COLUMNS: tuple[tuple[str, Callable[[Score], bool]], ...] = (
    ("Exact suspects", lambda score: score.exact),
    ("Suspects contained", lambda score: score.contained),
    ("Right cause", lambda score: score.cause),
    ("Right hung group", lambda score: score.group),
)


def render(scored: Sequence[Scored], versions: Sequence[str]) -> str:
    """Return the tables and the list of misses, as Markdown."""
    names = list(scored[0].scores)
    hanging = [each for each in scored if each.truth.verdict == "hang"]
    decided = [each for each in hanging if each.truth.decidable]
    counts = (
        f"{len(scored)} sets: {len(scored) - len(hanging)} without a hang, {len(decided)} that hang in a way that "
        f"dumps decide, {len(hanging) - len(decided)} in a way that they do not."
    )
    lines = [f"{', '.join(versions)}. {counts}", ""]
    rows = [("**all that dumps decide**", decided), *_by_row(hanging)]
    for title, is_right in _COLUMNS:
        lines += [f"### {title}", "", *_head("fault", "sets", *names)]
        for row, sets in rows:
            shares = (_percent([is_right(each.scores[name]) for each in sets]) for name in names)
            lines.append(_cells(row, str(len(sets)), *shares))
        lines.append("")
    lines += ["### False alarms, crashes, time", "", *_head("", *names)]
    lines += [_cells(title, *(measure(scored, name) for name in names)) for title, measure in _TOTALS]
    lines += ["", f"### Every miss of {OURS}", ""]
    lines += [_miss(each) for each in scored if not _is_right(each.scores[OURS])] or ["None."]
    return "\n".join(lines) + "\n"


def _by_row(scored: Sequence[Scored]) -> list[tuple[str, list[Scored]]]:
    rows: dict[str, list[Scored]] = {}
    for each in scored:
        rows.setdefault(each.row, []).append(each)
    return list(rows.items())


def _head(*titles: str) -> list[str]:
    return [_cells(*titles), "|" + "---|" * len(titles)]


def _cells(*values: str) -> str:
    return f"| {' | '.join(values)} |"


def _percent(hits: Sequence[bool]) -> str:
    return f"{100 * sum(hits) / len(hits):.1f} %" if hits else "-"


def _false_alarms(scored: Sequence[Scored], name: str) -> str:
    healthy = [each.scores[name].false_alarm for each in scored if each.truth.verdict == "healthy"]
    return f"{sum(healthy)} of {len(healthy)}"


def _crashes(scored: Sequence[Scored], name: str) -> str:
    return str(sum(each.scores[name].crashed for each in scored))


def _median(scored: Sequence[Scored], name: str) -> str:
    return f"{statistics.median(each.scores[name].seconds for each in scored):.3f}"


def _longest(scored: Sequence[Scored], name: str) -> str:
    return f"{max(each.scores[name].seconds for each in scored):.1f}"


_TOTALS: tuple[tuple[str, Callable[[Sequence[Scored], str], str]], ...] = (
    ("false alarms on sets without a hang", _false_alarms),
    ("crashes, or no answer in 60 s", _crashes),
    ("seconds a set, median", _median),
    ("seconds a set, longest", _longest),
)


def _is_right(score: Score) -> bool:
    return score.exact and score.cause and score.group and not score.false_alarm and not score.crashed


def _miss(each: Scored) -> str:
    truth = each.truth
    injected = "; ".join(f"{fault.name} of {list(fault.ranks)}" for fault in truth.faults)
    wanted = f"right: all of {list(truth.required)} within {list(truth.allowed)}, {' or '.join(truth.causes)}"
    return f"- `{each.name}`: {injected}; {wanted}; said: {each.said[OURS]}"


def publish(report: str, page: Path) -> None:
    """Put the report between the marks of the page."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n\n{report}\n{END}{after}", encoding="utf-8")


def draw(scored: Sequence[Scored], picture: Path) -> None:
    """Draw, for each fault and tool, how often the suspects were exact; without a hang, how often it was quiet."""
    mpl.use("Agg")
    names = list(scored[0].scores)
    rows = _by_row(scored)[::-1]
    height = 0.8 / len(names)
    figure = Figure(figsize=(9, 0.42 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(names):
        shares = [100 * statistics.mean(each.scores[name].exact for each in sets) for _, sets in rows]
        places = [index + (len(names) / 2 - number - 0.5) * height for index in range(len(rows))]
        axes.barh(places, shares, height, label=name, color=_COLOURS[number])
    axes.set_yticks(range(len(rows)), [f"{row} ({len(sets)})" for row, sets in rows])
    axes.set_xlim(0, 100)
    axes.set_xlabel("sets with exactly the right suspects, %")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(names), frameon=False)
    figure.savefig(picture, dpi=150)


_COLOURS = ("#1f6f54", "#d98a29", "#8a8f98")
