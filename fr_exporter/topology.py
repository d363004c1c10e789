"""Which node a rank runs on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from fr_exporter.config import Topology
from fr_exporter.diagnosis import Diagnosis
from fr_exporter.errors import ConfigError

_HOST_LINE = re.compile(r"(\S+)(?:\s+slots\s*=\s*([1-9][0-9]{0,5}))?")


def parse_hosts(text: str, ranks_per_node: int | None) -> tuple[str, ...]:
    """Return the host of each rank, in rank order, from the text of a hosts file.

    One host a line, as `HOST` with `ranks_per_node` ranks or as `HOST slots=N` with N; blank lines and `#` comments do
    not count. Raises ConfigError with the line.
    """
    hosts: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = _HOST_LINE.fullmatch(words)
        if match is None:
            raise ConfigError(f"hosts file line {number}: {words!r} is neither HOST nor HOST slots=N")
        ranks = ranks_per_node if match[2] is None else int(match[2])
        if ranks is None:
            message = f"how many ranks run on {match[1]!r}? write slots=N or set topology.ranks_per_node"
            raise ConfigError(f"hosts file line {number}: {message}")
        hosts.extend([match[1]] * ranks)
    if not hosts:
        raise ConfigError("the hosts file names no host; write one a line")
    return tuple(hosts)


def make_node_of(topology: Topology, hosts: Sequence[str] | None) -> Callable[[int, str | None], str | None]:
    """Return a function from a rank, and the host in its file's name or None, to the node's name; None is unknown.

    The file's name wins, then `hosts`, the host of each rank as `parse_hosts` gives it, then `topology.node`.
    """

    def node_of(rank: int, host: str | None) -> str | None:
        if host is not None:
            return host
        if hosts is not None:
            return hosts[rank] if rank < len(hosts) else None
        return topology.node

    return node_of


def locate_suspects(diagnosis: Diagnosis, hosts: Sequence[str]) -> Diagnosis:
    """Return the diagnosis with the node, by `hosts`, of each suspect without one: it left no dump that could tell."""
    suspects = tuple(
        replace(suspect, node=hosts[suspect.rank]) if suspect.node is None and suspect.rank < len(hosts) else suspect
        for suspect in diagnosis.suspects
    )
    return replace(diagnosis, suspects=suspects)
