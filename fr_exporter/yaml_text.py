"""YAML text as what is written in it: values as text, each with its line. No key has a meaning here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import yaml

from fr_exporter.errors import ConfigError
from fr_exporter.text import printable

_NULLS = frozenset({"", "~", "null", "Null", "NULL"})


@dataclass(frozen=True, slots=True)
class Value:
    """What a key is set to. `is_plain`: without quotes, so that `null` means nothing."""

    written: str
    is_plain: bool
    line: int

    def text(self, expand: Callable[[str], str]) -> str | None:
        """Return the text with its variables expanded; None where that leaves nothing, or a plain null."""
        text = expand(self.written)
        return None if not text or (self.is_plain and text in _NULLS) else text


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping: the line it begins on, and its values by key."""

    line: int
    values: Mapping[str, Value]


def read(
    text: str, target_keys: Collection[str], section_keys: Mapping[str, Collection[str]]
) -> tuple[list[Section], dict[str, Section]]:
    """Return the targets, and the other sections by name, that YAML `text` has; null is as what is not there.

    The arguments give the keys that each may have. Raises ConfigError with the line.
    """
    entries = _entries(_compose(text), "", ("targets", *section_keys))
    targets = entries.pop("targets", None)
    sections = {name: _section(node, name, section_keys[name]) for name, node in entries.items()}
    if targets is None or _is_null(targets):
        return [], sections
    if not isinstance(targets, yaml.SequenceNode) or not targets.value:
        raise _error(targets, "targets must be a list with at least one target")
    items = enumerate(targets.value)
    return [_section(item, f"targets[{index}]", target_keys) for index, item in items], sections


def write(document: object) -> str:
    """Return a document as YAML text, its keys in their order."""
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def _compose(text: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"config line {line}: not YAML: {error.reason}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 0 if mark is None else mark.line
        # `{node: ${NODE_NAME}}` reads well and is no YAML: braces end the word before them.
        quotes = any("${" in bad for bad in text.splitlines()[line : line + 1])
        hint = "; between { and } put ${VAR} in quotes" if quotes else ""
        raise ConfigError(f"config line {line + 1}: not YAML: {error.problem}{hint}") from None


def _section(node: yaml.Node, name: str, known: Collection[str]) -> Section:
    values = {}
    for word, value in _entries(node, name, known).items():
        if not isinstance(value, yaml.ScalarNode):
            raise _error(value, f"{name}.{word}: must be a single value")
        values[word] = Value(value.value, value.style is None, _line(value))
    return Section(_line(node), values)


def _entries(node: yaml.Node | None, name: str, known: Collection[str]) -> dict[str, yaml.Node]:
    """Return the values of a mapping by key; nothing, or null, is an empty mapping."""
    if node is None or _is_null(node):
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise _error(node, f"{name or 'the configuration'} must be a mapping of keys to values")
    entries: dict[str, yaml.Node] = {}
    for key, value in node.value:
        word = key.value if isinstance(key, yaml.ScalarNode) else "that is no word"
        dotted = f"{name}.{word}" if name else word
        if word not in known:
            raise _error(key, f"unknown key {dotted}; known keys: {', '.join(sorted(known))}")
        if word in entries:
            raise _error(key, f"{dotted} is set twice")
        entries[word] = value
    return entries


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in _NULLS


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _error(node: yaml.Node, message: str) -> ConfigError:
    return ConfigError(printable(f"config line {_line(node)}: {message}"))
