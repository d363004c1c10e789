"""What stands in an object of records, field by field, and how it is packed."""

from __future__ import annotations

from typing import Annotated

import msgspec

from fr_exporter.errors import PartialDump, RejectedDump
from fr_exporter.model import Kind
from fr_exporter.parsing.plain import Int

FORMAT = "fr-record"
VERSION = 1

# A node of 8 ranks has some 200 kB; what is far beyond was made to fill our memory.
MAX_BYTES = 32 * 2**20

_COMPRESSION_LEVEL = 9

Index = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
DumpVersion = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})*$")]


class Signature(msgspec.Struct, frozen=True, array_like=True):
    """What calls have in common from step to step; the fields are those of `Operation`."""

    operation: str
    kind: Kind
    source: Int | None
    destination: Int | None
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]


class CallColumn(msgspec.Struct, frozen=True, array_like=True):
    """The calls of one group: their places among those that are kept, and their sequence IDs, all as differences."""

    group: Index
    places: list[Index]
    collective_seq_ids: list[Int]
    p2p_seq_ids: list[Int]


class CallRows(msgspec.Struct, frozen=True):
    """The calls that are kept, in the order they were issued; record IDs as differences."""

    record_ids: list[Int]
    signatures: list[Index]
    states: list[Index]
    columns: list[CallColumn]


class CallDetail(msgspec.Struct, frozen=True, array_like=True):
    """What is told of open calls and of the last one only; the stack only where a report shows it."""

    place: Index
    issued_ns: Int | None
    started_ns: Int | None
    completed_ns: Int | None
    timeout_ms: Int | None
    stack: Index | None


class WireReading(msgspec.Struct, frozen=True, array_like=True):
    """Where the rank stands in a group, as `Standing` says; places of open calls as differences.

    `pairs_done` holds source, destination and how many.
    """

    last_enqueued: Int
    last_completed: Int
    first_open: Int | None
    open_operations: Int
    hides_transfers: bool
    pairs_done: list[tuple[Int | None, Int | None, Int]] | None
    open_calls: list[Index]


class WireAccount(msgspec.Struct, frozen=True, array_like=True):
    """What the ring told of one group, as `Account` says; `by_signs` is None where it says what `by_counter` does."""

    group: Index
    has_transfers: bool
    newest_recorded: Int | None
    by_counter: WireReading | None
    by_signs: WireReading | None


class WireExtremes(msgspec.Struct, frozen=True, array_like=True):
    """What is asked of all calls at once; the fields are those of `Extremes`."""

    last_record_id: Int | None
    newest_issue_ns: Int | None
    newest_time_ns: Int | None
    longest_timeout_ms: Int
    record_starts: bool


class RankRecord(msgspec.Struct, frozen=True):
    """One rank. `history` is the place from which on no call is left out, None where some may be.

    `counters` hold group, last enqueued, started and completed.
    """

    rank: Index
    dump_version: DumpVersion
    comm_lib_version: str | None
    dump_time_ns: Int | None
    world_size: Index | None
    health: dict[str, str]
    warnings: tuple[str, ...]
    groups: list[Index]
    has_counters: bool
    counters: list[tuple[Index, Int | None, Int | None, Int | None]]
    accounts: list[WireAccount]
    extremes: WireExtremes
    history: Index | None
    details: list[CallDetail]
    calls: msgspec.Raw


class NodeObject(msgspec.Struct, frozen=True):
    """The records of a node, and the tables that they point into.

    `members` are runs by the hash of the list: start, step, count, and so on. `groups` are name, description and hash;
    `states` are state and whether the call is retired; `unreadable` are rank, file, error and result.
    """

    format: str
    version: int
    sent_ns: Int | None
    training_job: str
    attempt: Index
    node: str
    members: dict[str, list[Int]]
    groups: list[tuple[str, str, str | None]]
    signatures: list[Signature]
    states: list[tuple[str, bool]]
    frames: list[tuple[str, str, int]]
    stacks: list[tuple[Index, ...]]
    ranks: list[RankRecord]
    unreadable: list[tuple[Index, str, str, str]]


def packed(content: bytes) -> bytes:
    """Return msgpack as an object."""
    import zstandard  # noqa: PLC0415  as in unpacked

    return zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL, write_checksum=True).compress(content)


def unpacked(data: bytes) -> bytes:
    """Return the msgpack in an object.

    Raises:
        PartialDump: it is cut short, or damaged.
        RejectedDump: it is larger than the records of any node.
    """
    # `analyze` seldom meets a record, and this import would be a tenth of its start.
    import zstandard  # noqa: PLC0415

    try:
        size = zstandard.frame_content_size(data)
        if size > MAX_BYTES:
            raise RejectedDump(f"refused: holds {size} bytes, the records of a node have at most {MAX_BYTES}")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_BYTES, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PartialDump(f"cut short or damaged: {error}") from None
