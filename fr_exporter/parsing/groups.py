"""The process groups of one dump: their names and members, and which counters are whose.

`pg_config` goes by name, `pg_status` by a rank-local id, which is another group on another rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from fr_exporter.errors import MalformedDump
from fr_exporter.model import GroupProgress, ProcessGroup
from fr_exporter.parsing.interning import Interning
from fr_exporter.parsing.plain import Int


class _Group(msgspec.Struct, frozen=True):
    """One value of `pg_config`; version 1 writes the bare member list instead."""

    desc: str = ""
    ranks: str | tuple[int, ...] = ()


class _Status(msgspec.Struct, frozen=True):
    """One value of `pg_status`; the JSON form writes numbers as strings."""

    last_enqueued_collective: Int = -1
    last_started_collective: Int = -1
    last_completed_collective: Int = -1


class Groups:
    """The groups of one dump, by the name and desc that entries write."""

    def __init__(self, pg_config: Mapping[Any, Any], interning: Interning) -> None:
        self._interning = interning
        self._configs = {str(name): _group_config(value) for name, value in pg_config.items()}
        self._names_by_id = _names_by_members(self._configs) if any(map(_is_bare, pg_config.values())) else {}
        self._descs: dict[str, str] = {}
        self._known: dict[tuple[str, str], ProcessGroup] = {}
        self.by_local_id: dict[int | None, ProcessGroup] = {}

    def named(self, name: str, desc: str = "") -> ProcessGroup:
        """Return a group; its members are unknown where pg_config lacks it.

        Its desc is what the entries say, where pg_config's own is empty. Where both say something else this is a
        former group of that name (`split_group` uses names again), of which pg_config tells nothing any more.
        """
        desc = desc or self._descs.get(name, "")
        known = self._known.get((name, desc))
        if known is not None:
            return known
        config = self._configs.get(name)
        if config is None or (desc and config.desc and desc != config.desc):
            group = self._interning.group(name, desc, None)
        else:
            self._descs[name] = desc or config.desc
            group = self._interning.group(self._names_by_id.get(name, name), self._descs[name], config.ranks)
        self._known[name, desc] = group
        return group

    def listed(self) -> tuple[ProcessGroup, ...]:
        """Return every group of pg_config."""
        return tuple(map(self.named, self._configs))

    def names(self) -> list[str]:
        """Return the keys of pg_config."""
        return list(self._configs)


def _is_bare(value: object) -> bool:
    return not isinstance(value, dict)


def _names_by_members(configs: Mapping[str, _Group]) -> dict[str, str]:
    """Return local id -> name for the groups of torch 2.3, which have none.

    Named by their members, and a number where several have the same: the local id of one and the same group differs
    between ranks.
    """
    names: dict[str, str] = {}
    counts: dict[str, int] = {}
    for local_id, config in sorted(configs.items(), key=_by_number):
        ranks = config.ranks if isinstance(config.ranks, tuple) else ()
        name = f"{ranks[0]}-{ranks[-1]} of {len(ranks)}" if ranks else local_id
        counts[name] = counts.get(name, 0) + 1
        names[local_id] = name if counts[name] == 1 else f"{name} ({counts[name]})"
    return names


def _by_number(item: tuple[str, object]) -> tuple[int, str]:
    return (int(item[0]) if item[0].isdecimal() else -1, item[0])


def _group_config(value: object) -> _Group:
    if isinstance(value, dict):
        return msgspec.convert(value, _Group)
    return _Group(ranks=msgspec.convert(value, str | tuple[int, ...]))


def progress_of(pg_status: Mapping[Any, Any], groups: Groups, warnings: list[str]) -> tuple[GroupProgress, ...]:
    """Map the counters, keyed by rank-local id, to groups, which go by name."""
    counters = {_local_id(key): msgspec.convert(value, _Status, strict=False) for key, value in pg_status.items()}
    mapped = _zip_in_order(counters, groups) or groups.by_local_id
    unmapped = sorted(counters.keys() - mapped.keys())
    if unmapped:
        ids = ", ".join(map(str, unmapped))
        warnings.append(f"pg_status has counters of local group ids that no call and no order explains: {ids}")
    return tuple(
        GroupProgress(
            group=mapped[local_id],
            last_enqueued=_counter(status.last_enqueued_collective),
            last_started=_counter(status.last_started_collective),
            last_completed=_counter(status.last_completed_collective),
        )
        for local_id, status in counters.items()
        if local_id in mapped
    )


def _local_id(key: object) -> int:
    try:
        return int(key)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError):
        raise MalformedDump(f"not a dump: pg_status has the key {str(key)[:40]!r}, not a number") from None


def _zip_in_order(counters: Mapping[int, _Status], groups: Groups) -> dict[int | None, ProcessGroup] | None:
    """Return local id -> group by the order in which groups were made, or None where that cannot be trusted.

    Names and local ids both grow as groups are made. Trusted only where both lists have one length and agree with
    every entry.
    """
    names = groups.names()
    if len(names) != len(counters) or not all(name.isdecimal() for name in names):
        return None
    zipped = dict(zip(sorted(counters), sorted(names, key=int), strict=True))
    mapped: dict[int | None, ProcessGroup] = {local_id: groups.named(name) for local_id, name in zipped.items()}
    agrees = all(mapped.get(local_id) == group for local_id, group in groups.by_local_id.items())
    return mapped if agrees else None


def _counter(value: int) -> int | None:
    return value if value >= 0 else None
