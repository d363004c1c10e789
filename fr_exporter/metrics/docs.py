"""docs/metrics.md, made from the catalogue.

python -m fr_exporter.metrics.docs [--check] PATH
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from fr_exporter.metrics.catalog import CAUSE, JOB, SECTIONS, Label, MetricSpec

_HEAD = """\
# Metrics

<!-- Made from fr_exporter/metrics/catalog.py by `python -m fr_exporter.metrics.docs docs/metrics.md`; do not edit. -->

All of these are on `/metrics`, as Prometheus text or OpenMetrics, whichever the scraper asks for.

- Every `fr_*` metric but those of the exporter itself carries `training_job` and `scope` beside the labels named below.
  `scope` is `job` where the directory is shared by all ranks, `node` where it holds one node's ranks.
- `cause` is one of {causes}; [diagnosis.md](diagnosis.md) describes each.
- `rank` is global. `rank_node` is the node of that rank; it is not called `node`, which usually belongs to the scrape
  target.
- `process_group` is the group's name. Where one job has two groups of one name, it is `name#` and 6 hex digits of the
  members (12 where 6 do not tell them apart).
- `operation` holds no peers: `nccl:send`, not `nccl:send 0->3`.
- Label values may come from dumps and file names: what is not UTF-8 in them reads `?`.
- A series disappears when what it says is no longer so; only the counters stay.
"""

_TAIL = """\
## How many series

A job has about 40 series of its own, a few for each hung process group, and per rank one for each process group and
counter the dump tells. Two limits in `config.yaml` hold that down:

- `limits.max_rank_series` (default 20,000) caps all `fr_rank_*` series of the exporter together. They are kept in this
  order: suspects, waiters of the headline group, other ranks of hung groups by how far they are behind, the rest.
- `limits.max_suspects` (default 64) caps `fr_suspect_rank` for each job; the suspects of higher confidence are kept.
  `fr_suspect_ranks` counts all of them, and `fr_incident_info` names all of them as ranges.

`fr_exporter_series_dropped` says how many series of which metric were left out; 0 means that nothing is missing.

`fr_incident_info` holds an incident in one series, so that a page needs nothing else. Its values are at most 256
characters, then `…+N`: N ranks, nodes or characters more.
"""


def render() -> str:
    """Return the text of docs/metrics.md."""
    sections = (f"## {section.title}\n\n{_table(section.metrics)}" for section in SECTIONS)
    causes = ", ".join(f"`{cause}`" for cause in CAUSE.values)
    return "\n".join((_HEAD.format(causes=causes), *sections, _TAIL))


def main(argv: list[str] | None = None) -> int:
    """Write the page, or with --check say in one line that it is out of date and return 1."""
    parser = argparse.ArgumentParser(prog="python -m fr_exporter.metrics.docs", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail where the page is out of date")
    parser.add_argument("path", type=Path)
    options = parser.parse_args(argv)
    if not options.check:
        options.path.write_text(render(), encoding="utf-8")
    elif not options.path.exists() or options.path.read_text(encoding="utf-8") != render():
        print(f"{options.path} is out of date: run python -m fr_exporter.metrics.docs {options.path}", file=sys.stderr)
        return 1
    return 0


def _table(metrics: Iterable[MetricSpec]) -> str:
    rows = (f"| `{spec.name}` | {spec.type} | {_labels(spec)} | {spec.help} |\n" for spec in metrics)
    return "| metric | type | labels | meaning |\n|---|---|---|---|\n" + "".join(rows)


def _labels(spec: MetricSpec) -> str:
    """Return a metric's own labels; what the head of the page says already is left out."""
    own = spec.labels[len(JOB) :] if spec.labels[: len(JOB)] == JOB else spec.labels
    return ", ".join(_label(label) for label in own)


def _label(label: Label) -> str:
    if not label.values or label is CAUSE:
        return f"`{label.name}`"
    return f"`{label.name}` ({', '.join(f'`{value}`' for value in label.values)})"


if __name__ == "__main__":
    sys.exit(main())
