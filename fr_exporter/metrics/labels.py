"""Label values: what dumps and file systems say, made fit for an exposition."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from fr_exporter.diagnosis import Diagnosis
from fr_exporter.model import ProcessGroup

MAX_LENGTH = 256
DIGITS = 6

GroupLabels = dict[str, tuple[str, str]]


def clean(value: str) -> str:
    """Return the value with `?` for each lone surrogate: one that is not UTF-8 would cost the whole scrape."""
    return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")


def shorten(value: str) -> str:
    """Return at most MAX_LENGTH characters, then `…+N` for the N left out."""
    return value if len(value) <= MAX_LENGTH else f"{value[:MAX_LENGTH]}…+{len(value) - MAX_LENGTH}"


def group_labels(diagnosis: Diagnosis) -> GroupLabels:
    """Return the labels `process_group` and `process_group_desc` of each group, by its key.

    A group is (name, members). Where two have one name, digits of the members tell them apart, as many as it takes.
    """
    groups: dict[str, ProcessGroup] = {}
    for group in _groups(diagnosis):
        groups.setdefault(group.key, group)
    by_name: dict[str, list[ProcessGroup]] = defaultdict(list)
    for group in groups.values():
        by_name[group.name].append(group)
    return {
        group.key: (clean(label), clean(group.desc))
        for namesakes in by_name.values()
        for group, label in zip(namesakes, _names(namesakes), strict=True)
    }


def _groups(diagnosis: Diagnosis) -> Iterable[ProcessGroup]:
    for hung in diagnosis.hung_process_groups:
        yield hung.group
    for mismatch in diagnosis.mismatches:
        yield mismatch.group
    for report in diagnosis.ranks:
        for progress in report.progress:
            yield progress.group


def _names(namesakes: list[ProcessGroup]) -> list[str]:
    if len(namesakes) == 1:
        return [namesakes[0].name]
    full = [group.key for group in namesakes]
    short = [key[: len(group.name) + 1 + DIGITS] for key, group in zip(full, namesakes, strict=True)]
    return short if len(set(short)) == len(short) else full
