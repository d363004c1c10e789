"""The committed dashboards: what they ask, where they link, and how they are laid out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.source.panels import ANNOTATION_TEXTS
from fr_exporter.metrics.catalog import CATALOG
from tests.promql import metric_names

FOLDER = Path(__file__).resolve().parents[2] / "dashboards"
UIDS = {
    "hang-overview.json": "fr-hang-overview",
    "incident.json": "fr-incident",
    "exporter.json": "fr-exporter",
}
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COUNTERS = ("fr_rank_last_enqueued_seq_id", "fr_rank_last_started_seq_id", "fr_rank_last_completed_seq_id")
GAUGES_OF_JOBS = {name for name, spec in CATALOG.items() if spec.type == "gauge" and "scope" in spec.label_names}


@pytest.fixture(scope="module", params=sorted(UIDS))
def name(request: pytest.FixtureRequest) -> str:
    """Return the file name of each dashboard in turn."""
    return str(request.param)


@pytest.fixture(scope="module")
def board(name: str) -> dict[str, Any]:
    """Return the content of the dashboard."""
    return _load(name)


def test_identity(name: str, board: dict[str, Any]) -> None:
    """Each dashboard has its fixed uid, the tag, the browser's time zone and a refresh of some seconds."""
    assert board["uid"] == UIDS[name]
    assert board["tags"] == ["fr_exporter"]
    assert board["timezone"] == "browser"
    assert board["refresh"] in ("10s", "30s")


def test_the_data_source_is_a_choice(board: dict[str, Any]) -> None:
    """Every panel, query, variable and annotation asks the data source that the user chose."""
    first, *others = board["templating"]["list"]
    assert (first["type"], first["name"], first["query"]) == ("datasource", "datasource", "prometheus")
    asking = [*_panels(board), *others, *board["annotations"]["list"]]
    asking += [target for panel in _panels(board) for target in panel["targets"]]
    assert [item["datasource"] for item in asking] == [DATASOURCE] * len(asking)
    assert "training_job" in [variable["name"] for variable in others]


def test_links_lead_to_the_other_dashboards(name: str, board: dict[str, Any]) -> None:
    """Every dashboard links to both others and keeps the time range; every link has a dashboard as its target."""
    targets = [link["url"].removeprefix("/d/").split("?")[0] for link in board["links"]]
    assert set(targets) == set(UIDS.values()) - {UIDS[name]}
    assert all(link["keepTime"] for link in board["links"])
    assert set(re.findall(r"/d/([\w-]+)", json.dumps(board))) <= set(UIDS.values())


def test_rows_of_jobs_link_to_their_incident() -> None:
    """A job in a table of the overview leads to its incident, with the time range and the data source."""
    panels = {panel["title"]: panel for panel in _panels(_load("hang-overview.json"))}
    for title in ("Hung now", "All jobs"):
        overrides = {
            each["matcher"]["options"]: each["properties"] for each in panels[title]["fieldConfig"]["overrides"]
        }
        (links,) = [found["value"] for found in overrides["Job"] if found["id"] == "links"]
        assert links[0]["url"] == (
            "/d/fr-incident?var-training_job=${__value.raw}&${datasource:queryparam}&${__url_time_range}"
        )


def test_panels_explain_themselves(board: dict[str, Any]) -> None:
    """Every panel has a title, a description and a text for when there is nothing to show."""
    for panel in _panels(board):
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["noValue"], panel["title"]


def test_layout(board: dict[str, Any]) -> None:
    """Ids are unique, and no two panels claim one place of the grid, 24 wide."""
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_exporters_of_one_directory_are_not_added_up(board: dict[str, Any]) -> None:
    """What a `sum` adds of the jobs' gauges is the `max`, or a count of ranks, over exporters."""
    for expr in _expressions(board):
        for summed in _arguments(expr, "sum"):
            bare = summed
            # The longest first: it may hold others.
            for argument in sorted((*_arguments(summed, "max"), *_arguments(summed, "count")), key=len, reverse=True):
                bare = bare.replace(argument, "")
            assert not metric_names(bare) & GAUGES_OF_JOBS, expr


def test_send_and_recv_counters_are_never_compared(board: dict[str, Any]) -> None:
    """Only counters of collectives compare between ranks; the recording rules behind the panels read no others."""
    rules = [rule["expr"] for rule in _recording_rules()]
    for expr in [*_expressions(board), *rules]:
        for counter in COUNTERS:
            for selector in re.findall(rf"(?<![\w:]){counter}(?![\w:])(\{{[^}}]*\}})?", expr):
                assert 'kind="collective"' in selector, expr


def test_grafana_knows_every_key(board: dict[str, Any]) -> None:
    """Nothing of the JSON is lost on its way through the SDK, but what only the data source reads of an annotation."""
    for annotation in board["annotations"]["list"]:
        for key, value in ANNOTATION_TEXTS.items():
            assert annotation.pop(key) == value
    again = json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))
    assert list(_lost(board, again)) == []


def _lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    if isinstance(before, dict):
        for key, value in before.items():
            yield from _lost(value, after.get(key), f"{path}.{key}")
    elif isinstance(before, list) and len(before) == len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _lost(old, new, f"{path}[{index}]")
    elif before != after:
        yield path


def _load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return content


def _panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def _expressions(board: dict[str, Any]) -> Iterator[str]:
    for panel in _panels(board):
        yield from (target["expr"] for target in panel["targets"])
    yield from (annotation["expr"] for annotation in board["annotations"]["list"])
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            (series,) = re.findall(r"label_values\((.*), \w+\)", variable["query"]["query"])
            yield series


def _recording_rules() -> Iterator[dict[str, str]]:
    for path in ("rules/recording.yaml", "rules/alerts.yaml"):
        for group in yaml.safe_load((FOLDER / path).read_text(encoding="utf-8"))["groups"]:
            yield from (rule for rule in group["rules"] if "record" in rule)


def _arguments(expr: str, aggregation: str) -> Iterator[str]:
    """Yield what stands between the brackets of each use of an aggregation."""
    for use in re.finditer(rf"\b{aggregation}\b\s*((by|without)\s*\([^)]*\)\s*)?\(", expr):
        depth, end = 1, use.end()
        while depth > 0:
            depth += {"(": 1, ")": -1}.get(expr[end], 0)
            end += 1
        yield expr[use.end() : end - 1]
