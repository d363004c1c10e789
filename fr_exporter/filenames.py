"""Rank and host, as the name of a dump file tells them: no dump says inside whose it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

WELL_KNOWN_PREFIXES = ("_dump_", "nccl_trace_rank_", "comm_lib_trace_rank_", "rank_", "")

# Beyond any job: a longer number is a time or a job's id.
_MAX_RANK = 2**20 - 1

_AFTER_PREFIX = re.compile(
    r"(?P<host>.*?)(?:(?:^|(?<=[-_.]))rank)?(?P<separator>[-_.]*)(?<![0-9])(?P<rank>[0-9]{1,7})(?:\.json)?", re.DOTALL
)


def parse_filename(name: str, prefix: str) -> tuple[int, str | None] | None:
    """Return (rank, host) of a file's name, host None where the name has none; None where it is no dump's name.

    The rank is the trailing integer; what stands between prefix and rank is the host.
    """
    if not name.startswith(prefix):
        return None
    # A shorter prefix, as that of the pattern `*`, must not turn `nccl_trace_rank` into a host.
    longest = max((prefix, *(known for known in WELL_KNOWN_PREFIXES if name.startswith(known))), key=len)
    match = _AFTER_PREFIX.fullmatch(name[len(longest) :])
    if match is None or int(match["rank"]) > _MAX_RANK:
        return None
    host = match["host"].strip("-_.")
    # `node02` alone is a host: nobody pads a rank and glues it to a name.
    if host and not match["separator"] and re.match("0[0-9]", match["rank"]):
        return None
    return int(match["rank"]), host or None


@dataclass(frozen=True, slots=True)
class Matcher:
    """Which names in a directory are dumps: those that fit `pattern` and hold a rank after `prefix`."""

    prefix: str
    pattern: str

    @classmethod
    def from_pattern(cls, pattern: str) -> Matcher:
        """Build from a shell pattern such as `_dump_*`; the prefix is what stands before its first wildcard."""
        literal = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
        # In `_dump_1*` the 1 belongs to the ranks 1, 10, 11, ….
        return cls(literal.rstrip("0123456789"), pattern)

    @classmethod
    def from_prefix(cls, prefix: str) -> Matcher:
        """Build from the name's fixed beginning, to which the writer appends the rank."""
        return cls(prefix, "*")

    def match(self, name: str) -> tuple[int, str | None] | None:
        """Return (rank, host) where the name is a dump's, else None."""
        return parse_filename(name, self.prefix) if fnmatchcase(name, self.pattern) else None
