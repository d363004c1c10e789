"""Bytes of one dump file -> `RankDump`, whatever its format and version."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO

from fr_exporter.errors import MalformedDump, PartialDump, RejectedDump
from fr_exporter.model import NodeRecords, RankDump
from fr_exporter.parsing import json_dump, pickle_safe, record
from fr_exporter.parsing.interning import Interning
from fr_exporter.parsing.schema import Origin, to_rank_dump

# The first bytes tell: protocol 2 and later pickles start with 0x80, older ones with the opcode of a container.
FORMATS: tuple[tuple[tuple[bytes, ...], Callable[[BinaryIO], object]], ...] = (
    ((b"(\xb5/\xfd",), record.load),
    ((b"\x80", b"(", b"]", b"}"), pickle_safe.load),
    ((b"{", b"[", b" ", b"\t", b"\r", b"\n", b"\xef"), json_dump.load),
)
_LONGEST_START = max(len(start) for starts, _ in FORMATS for start in starts)


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
        data = self.decode(file, size=size)
        if isinstance(data, dict) and data.get("format") == record.FORMAT:
            raise MalformedDump("holds the records of a node: analyse its job by URL, such as file:///path/to/job")
        return to_rank_dump(data, origin, self._interning)

    def read_object(self, data: bytes, *, source: str, mtime_ns: int) -> NodeRecords:
        """Return the records in an object, as `record.decode` does. Raises as `read`."""
        return record.decode(data, self._interning, source=source, mtime_ns=mtime_ns)

    def decode(self, file: BinaryIO, *, size: int) -> object:
        """Return the plain dict or list that the file holds, unchecked. Raises as `read`."""
        if size > self._max_bytes:
            raise RejectedDump(f"refused: {size} bytes, limits.max_dump_bytes allows {self._max_bytes}")
        start = file.read(_LONGEST_START)
        if not start:
            raise PartialDump("empty: nothing is written yet")
        file.seek(0)
        for starts, load in FORMATS:
            if start.startswith(starts):
                return load(file)
        raise MalformedDump("not a dump: neither a pickle nor JSON")
