"""Bytes of one dump file -> `RankDump`, whatever its format and version."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO

from fr_exporter.errors import MalformedDump, PartialDump, RejectedDump
from fr_exporter.model import RankDump
from fr_exporter.parsing import json_dump, pickle_safe
from fr_exporter.parsing.interning import Interning
from fr_exporter.parsing.schema import Origin, to_rank_dump

# The first byte tells: protocol 2 and later pickles start with 0x80, older ones with the opcode of a container.
FORMATS: tuple[tuple[bytes, Callable[[BinaryIO], object]], ...] = (
    (b"\x80(]}", pickle_safe.load),
    (b"{[ \t\r\n\xef", json_dump.load),
)


class DumpReader:
    """Read the dumps of one target.

    One reader shares what the dumps of a job repeat: member lists, groups, stack frames.
    """

    def __init__(self, max_bytes: int, max_ranks: int = 131_072) -> None:
        """Refuse files of more than `max_bytes` bytes, and member lists that name ranks from `max_ranks` on."""
        self._max_bytes = max_bytes
        self._interning = Interning(max_ranks)

    def read(
        self, file: BinaryIO, *, size: int, rank: int, node: str | None, source: str, mtime_ns: int | None
    ) -> RankDump:
        """Return what the dump in an open, seekable file says.

        `size` is the file's size in bytes, known before it is read; `rank` and `node` come from its name, since a
        dump does not hold them; `mtime_ns` stands for the time at which it was written.

        Raises:
            DumpError: the file gives no dump; the message is one line without the path.
        """
        origin = Origin(rank=rank, node=node, source=source, mtime_ns=mtime_ns)
        return to_rank_dump(self.decode(file, size=size), origin, self._interning)

    def decode(self, file: BinaryIO, *, size: int) -> object:
        """Return the plain dict or list that the file holds, unchecked. Raises as `read`."""
        if size > self._max_bytes:
            raise RejectedDump(f"refused: {size} bytes, limits.max_dump_bytes allows {self._max_bytes}")
        first = file.read(1)
        if not first:
            raise PartialDump("empty: nothing is written yet")
        file.seek(0)
        for first_bytes, load in FORMATS:
            if first in first_bytes:
                return load(file)
        raise MalformedDump("not a dump: neither a pickle nor JSON")
