"""The runbook has what each alert links to, and the documents about paging hold together."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.source.thresholds import RULE_VALUES

ROOT = Path(__file__).resolve().parents[2]
RUNBOOK = ROOT / "docs" / "runbook.md"
PAGING = ROOT / "docs" / "paging.md"
DOCUMENTS = (RUNBOOK, PAGING, ROOT / "dashboards" / "README.md")

HEADINGS = ["Meaning", "Impact", "What to look at", "What to do"]
PARSERS: dict[str, Callable[[str], object]] = {"yaml": yaml.safe_load, "json": json.loads}


def rules() -> list[dict[str, Any]]:
    """Return every alert rule, in the order of the file; some alerts have several."""
    groups = yaml.safe_load((ROOT / "dashboards" / "rules" / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def prose(document: Path) -> str:
    """Return a document without its fenced blocks, in which # begins a comment."""
    return re.sub(r"^ *```.*?^ *```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def entries() -> dict[str, list[str]]:
    """Return the sub-headings of each section of the runbook."""
    sections = re.split(r"^## ", prose(RUNBOOK), flags=re.MULTILINE)[1:]
    return {section.splitlines()[0]: re.findall(r"^### (.*)$", section, re.MULTILINE) for section in sections}


def fenced(document: Path) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each fenced block."""
    return (
        (match["language"], match["text"])
        for match in re.finditer(
            r"^ *```(?P<language>\w*)\n(?P<text>.*?)^ *```$",
            document.read_text(encoding="utf-8"),
            re.MULTILINE | re.DOTALL,
        )
    )


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_runbook_has_one_entry_for_each_alert_and_no_other() -> None:
    """The entries are the alerts, in the order of the rules."""
    assert list(entries()) == list(dict.fromkeys(rule["alert"] for rule in rules()))


@pytest.mark.parametrize("name", sorted({rule["alert"] for rule in rules()}))
def test_an_entry_says_what_it_means_and_what_to_do(name: str) -> None:
    """Each entry has the four headings first and in one order; more may follow."""
    assert entries()[name][: len(HEADINGS)] == HEADINGS


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_carries_what_the_one_who_is_paged_needs(rule: dict[str, Any]) -> None:
    """It has a CamelCase name, a severity, a summary of one line, a description, and a link to its entry."""
    annotations = rule["annotations"]
    assert re.fullmatch(r"FR([A-Z][a-z]+)+", rule["alert"])
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert annotations["summary"]
    assert "\n" not in annotations["summary"]
    assert annotations["description"]
    assert annotations["runbook_url"].endswith(f"/docs/runbook.md#{rule['alert'].lower()}")


def test_the_thresholds_in_the_documents_are_those_of_the_rules() -> None:
    """Each row of a name and a duration or number has the value that the rules are made with."""
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d+[a-z]?) \|", prose(PAGING), re.MULTILINE))
    assert "memory" in rows
    assert rows == {name: RULE_VALUES[name] for name in rows}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.stem)
def test_configuration_to_copy_parses(document: Path) -> None:
    """Fenced YAML and JSON is YAML and JSON."""
    for language, text in fenced(document):
        if language in PARSERS:
            assert PARSERS[language](text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.stem)
def test_relative_links_lead_somewhere(document: Path) -> None:
    """The file that a link names exists, and has the heading that it names."""
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", prose(document)):
        target = (document.parent / path).resolve() if path else document
        assert target.is_file(), path
        if anchor:
            assert anchor in anchors(target), anchor
