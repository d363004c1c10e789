"""Plain data of any dump version -> `RankDump`.

The wire types here and beside name every key we read, with the type it must have; keys we do not know are passed over,
so that a newer minor version still reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from fr_exporter.errors import MalformedDump, RejectedDump
from fr_exporter.model import RankDump
from fr_exporter.parsing.entries import read_calls
from fr_exporter.parsing.groups import Groups, progress_of
from fr_exporter.parsing.interning import Interning
from fr_exporter.parsing.plain import refuse_other_types

KNOWN_MAJORS = (1, 2)
NEWEST_KNOWN = (2, 10)
# The bare list of torch 2.2 carries no version.
LIST_VERSION = "1.0"


class _Health(msgspec.Struct, frozen=True):
    """One value of `health_check_results`."""

    status: str = "unknown"


class _Dump(msgspec.Struct, frozen=True):
    """The top level."""

    version: str
    comm_lib_version: str | None = None
    nccl_version: str | None = None
    pg_config: dict[Any, Any] | None = None
    pg_status: dict[Any, Any] | None = None
    entries: list[Any] | None = None
    health_check_results: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """What the file tells beside its content: rank and host from its name, its path, its mtime."""

    rank: int
    node: str | None
    source: str
    mtime_ns: int | None


def to_rank_dump(data: object, origin: Origin, interning: Interning) -> RankDump:
    """Return what the plain data of one dump says.

    Raises:
        MalformedDump: a key is missing or has another type than a dump's; the message names it.
        RejectedDump: the version's major number is unknown, or something in it is no plain data.
    """
    if isinstance(data, (list, tuple)):
        data = {"version": LIST_VERSION, "entries": data}
    if not isinstance(data, dict):
        raise MalformedDump(f"not a dump: holds a {type(data).__name__}, not a dict or list")
    refuse_other_types(value for key, value in data.items() if key != "entries")
    try:
        return _read(msgspec.convert(data, _Dump), origin, interning)
    except msgspec.ValidationError as error:
        raise MalformedDump(f"not a dump: {error}") from None


def _read(raw: _Dump, origin: Origin, interning: Interning) -> RankDump:
    warnings = _check_version(raw.version)
    groups = Groups(raw.pg_config or {}, interning)
    operations = read_calls(raw.entries or [], groups, interning)
    progress = progress_of(raw.pg_status or {}, groups, warnings)
    return RankDump(
        rank=origin.rank,
        node=origin.node,
        source=origin.source,
        version=raw.version,
        comm_lib_version=raw.comm_lib_version or raw.nccl_version or None,
        groups=groups.listed(),
        progress=progress,
        operations=operations,
        health=_health(raw.health_check_results or {}),
        dump_time_ns=origin.mtime_ns,
        has_counters=bool(raw.pg_status),
        warnings=tuple(warnings),
    )


def _check_version(text: str) -> list[str]:
    """Return the warnings of this version; refuse an unknown major. Numbers compare as numbers: 2.10 is after 2.9."""
    try:
        version = tuple(int(part) for part in text.split("."))
    except ValueError:
        raise RejectedDump(f"refused: the dump has the version {text[:40]!r}, known are 1.x and 2.x") from None
    if version[0] not in KNOWN_MAJORS:
        raise RejectedDump(f"refused: the dump has version {text[:40]}, known are 1.x and 2.x")
    if version > NEWEST_KNOWN:
        return [f"dump version {text} is newer than any known here (2.10), read as 2.10"]
    return []


def _health(results: Mapping[str, Any]) -> dict[str, str]:
    return {
        device: msgspec.convert(result, _Health).status
        for device, result in results.items()
        if isinstance(result, dict)
    }
