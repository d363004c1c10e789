"""Which metrics a PromQL expression reads."""

from __future__ import annotations

import re

_STRING = r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|`[^`]*`"""
# Strings go first: they can hold all that the others look for. What separates operands stays a separator.
_REMOVED = (
    (re.compile(rf"{_STRING}|#[^\n]*"), " "),
    (re.compile(r"\{[^}]*\}|\[[^\]]*\]|(?<![\w:.])\d[\w.]*"), " "),
    (re.compile(r"\b(by|without)\s*\([^)]*\)", re.IGNORECASE), " "),
    (re.compile(r"\b(on|ignoring|group_left|group_right)\s*\([^)]*\)", re.IGNORECASE), ";"),
    (re.compile(r"\b(and|or|unless|atan2|bool|offset|group_left|group_right|inf|nan)\b", re.IGNORECASE), ";"),
)
_METRIC = re.compile(r"[a-zA-Z_:][\w:]*(?![\w:]|\s*\()")


def metric_names(expr: str) -> set[str]:
    """Return the names of the metrics; those chosen by a matcher on `__name__` are not seen."""
    for pattern, separator in _REMOVED:
        expr = pattern.sub(separator, expr)
    return set(_METRIC.findall(expr))
