"""Write the rules and dashboards, or with --check say which are out of date.

python -m dashboards.source [--check]
"""

from __future__ import annotations

import argparse
import string
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dashboards.source import exporter, incident, overview
from dashboards.source.panels import to_json
from dashboards.source.thresholds import RULE_VALUES

SOURCE = Path(__file__).resolve().parent


class _Rules(string.Template):
    """Rules are full of `$labels` and `{{ }}`, so a value stands as @{name}."""

    delimiter = "@"


def rules(name: str) -> str:
    """Return a rule file with every @{name} replaced. Raises KeyError for a name that thresholds.py does not have."""
    return _Rules((SOURCE / "rules" / name).read_text(encoding="utf-8")).substitute(RULE_VALUES)


FILES: dict[str, Callable[[], str]] = {
    "rules/recording.yaml": partial(rules, "recording.yaml"),
    "rules/alerts.yaml": partial(rules, "alerts.yaml"),
    "hang-overview.json": lambda: to_json(overview.dashboard()),
    "incident.json": lambda: to_json(incident.dashboard()),
    "exporter.json": lambda: to_json(exporter.dashboard()),
}


def main(argv: list[str] | None = None, folder: Path = SOURCE.parent) -> int:
    """Write every file below `folder`; with --check name each that differs, one a line, and return 1."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.source", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail where a file is out of date")
    check = parser.parse_args(argv).check
    stale = 0
    for name, render in FILES.items():
        path = folder / name
        if not check:
            path.write_text(render(), encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != render():
            print(f"{path} is out of date: run python -m dashboards.source", file=sys.stderr)
            stale += 1
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
