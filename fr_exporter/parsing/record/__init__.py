"""The record: a compact form of one rank's dump that travels between machines; docs/record-format.md describes it.

An object holds the records of all ranks of a node, as one zstandard frame of msgpack. What the ranks repeat stands in
tables beside them: member lists by their hash, groups, the signatures of calls, stack frames. Of the ring that is kept
which the analysis can need: every open call, and the last calls of all as the rank's history.
"""

from __future__ import annotations

from fr_exporter.parsing.record.reading import decode, load, newest_dump_time
from fr_exporter.parsing.record.wire import FORMAT, MAX_BYTES
from fr_exporter.parsing.record.writing import encode, stamp

__all__ = ["FORMAT", "MAX_BYTES", "decode", "encode", "load", "newest_dump_time", "stamp"]
