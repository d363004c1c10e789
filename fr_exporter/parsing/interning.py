"""What the dumps of one job repeat, kept once.

Every rank repeats the full member list of each of its groups: 16,384 ranks of a default group write 16,384 times
16,384 numbers. Each distinct list is parsed once and shared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import msgspec

from fr_exporter.errors import MalformedDump, RejectedDump
from fr_exporter.model import Frame, ProcessGroup, members_digest

K = TypeVar("K")
T = TypeVar("T")
V = TypeVar("V")

_FRAME_KEY = itemgetter("name", "filename", "line")

# Hostile files could fill the tables without end; a real job stays far below this.
_MAX_ENTRIES = 200_000

# How often all ranks of a job may stand in the member lists of a node: in a few groups as large as the job.
_MAX_WORLDS = 16

_P2P_NAME = re.compile(r"(.*\b(?:send|recv)) (\d{1,9}|\?)(->|<-)(\d{1,9}|\?)")


class CallName(NamedTuple):
    """A profiling name taken apart; `source` and `destination` are group ranks, None where not told.

    `is_closing` marks the entry that closes a coalesced batch.
    """

    operation: str
    is_p2p: bool
    is_closing: bool
    source: int | None
    destination: int | None


class Interning:
    """Tables from what a dump writes to the one value that stands for it."""

    def __init__(self, max_ranks: int) -> None:
        """Refuse member lists that name ranks from `max_ranks` on."""
        self._max_ranks = max_ranks
        self._members: dict[str | tuple[int, ...], tuple[tuple[int, ...], str]] = {}
        self._lists: dict[str, tuple[int, ...]] = {}
        self._groups: dict[tuple[str, str, str], ProcessGroup] = {}
        self._values: dict[Any, Any] = {}
        self._names: dict[str, CallName] = {}
        self._frames: dict[tuple[Any, ...], Frame] = {}

    def group(self, name: str, desc: str, members: str | tuple[int, ...] | None) -> ProcessGroup:
        """Return the group of this name and member list, as written (`"[0, 1]"`) or as a tuple."""
        ranks, digest = (None, "") if members is None else self._parse_members(members)
        key = (name, desc, digest)
        group = self._groups.get(key)
        if group is None:
            group = _remember(self._groups, key, ProcessGroup.of(name, desc, ranks, digest))
        return group

    def groups_by_digest(
        self, groups: Iterable[tuple[str, str, str | None]], members: Mapping[str, Sequence[int]]
    ) -> list[ProcessGroup]:
        """Return the groups of these names, descriptions and hashes.

        `members` are the member lists by hash, as runs: start, step, count, and so on.

        Raises:
            MalformedDump: a list is not there, or not the one that its hash stands for.
            RejectedDump: there are more ranks than the limit allows.
        """
        if sum(count for runs in members.values() for count in runs[2::3]) > self._max_ranks * _MAX_WORLDS:
            raise RejectedDump(f"refused: member lists of more than {_MAX_WORLDS} times {self._max_ranks} ranks")
        found: list[ProcessGroup] = []
        for name, desc, digest in groups:
            key = (name, desc, digest or "")
            group = self._groups.get(key)
            if group is None:
                ranks = None if digest is None else self._by_digest(digest, members.get(digest, ()))
                group = _remember(self._groups, key, ProcessGroup.of(name, desc, ranks, digest))
            found.append(group)
        return found

    def shared(self, value: T) -> T:
        """Return the one value that stands for all that are equal to it."""
        known: T | None = self._values.get(value)
        return known if known is not None else _remember(self._values, value, value)

    def call_name(self, profiling_name: str) -> CallName:
        """Take `nccl:send 0->3` apart; other names stay whole."""
        known = self._names.get(profiling_name)
        return known if known is not None else _remember(self._names, profiling_name, _split(profiling_name))

    def stack(self, raw: Any) -> tuple[Frame, ...]:
        """Return the frames that a dump writes as a list of dicts, none where it writes none.

        Raises `msgspec.ValidationError` where it is no such list.
        """
        stack = msgspec.convert(raw or (), list[Any])
        try:
            return tuple(map(self._frames.__getitem__, map(_FRAME_KEY, stack)))
        except (KeyError, TypeError):  # one of them is new, or none
            return tuple(map(self._frame, stack))

    def _frame(self, raw: Any) -> Frame:
        frame = msgspec.convert(raw, Frame)
        key = msgspec.structs.astuple(frame)
        known = self._frames.get(key)
        return known if known is not None else _remember(self._frames, key, frame)

    def _parse_members(self, members: str | tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        known = self._members.get(members)
        if known is not None:
            return known
        try:
            ranks = msgspec.json.decode(members, type=tuple[int, ...]) if isinstance(members, str) else members
        except msgspec.MsgspecError:
            raise MalformedDump(f"not a dump: pg_config has the member list {members[:40]!r}") from None
        self._check(ranks)
        return _remember(self._members, members, (ranks, members_digest(ranks)))

    def _by_digest(self, digest: str, runs: Sequence[int]) -> tuple[int, ...]:
        known = self._lists.get(digest)
        if known is not None:
            return known
        ranks: list[int] = []
        for start, step, count in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
            ranks.extend(range(start, start + step * count, step) if step else [start] * count)
        self._check(ranks)
        if members_digest(ranks) != digest:
            raise MalformedDump(f"not records: the member list {digest[:40]!r} is another, or not there")
        return _remember(self._lists, digest, tuple(ranks))

    def _check(self, ranks: Sequence[int]) -> None:
        if ranks and not 0 <= min(ranks) <= max(ranks) < self._max_ranks:
            raise RejectedDump(f"refused: pg_config names ranks outside 0 to {self._max_ranks - 1} (limits.max_ranks)")
        if len(set(ranks)) != len(ranks):
            raise MalformedDump("not a dump: pg_config lists a rank twice in one group")


def _split(profiling_name: str) -> CallName:
    match = _P2P_NAME.fullmatch(profiling_name)
    if match is None:
        return CallName(profiling_name, False, profiling_name.endswith("coalesced"), None, None)
    operation, own, arrow, peer = match.groups()
    first = None if own == "?" else int(own)
    second = None if peer == "?" else int(peer)
    source, destination = (first, second) if arrow == "->" else (second, first)
    return CallName(operation, True, False, source, destination)


def _remember(table: dict[K, V], key: K, value: V) -> V:
    if len(table) >= _MAX_ENTRIES:
        table.clear()
    table[key] = value
    return value
