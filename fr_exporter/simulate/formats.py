"""The forms in which torch and others have written dumps, made from a dict of version 2.10."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fr_exporter.parsing import pickle_safe

Dump = dict[str, Any]

_THREAD = frozenset({"thread_id", "thread_name"})
_NAMED = frozenset({"process_group", "collective_seq_id", "p2p_seq_id", "is_p2p", "input_dtypes", "output_dtypes"})
_TIMED = frozenset(
    {"record_id", "op_id", "time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns", "retired"}
)

# What the entries of each version do not have yet. The first format had no version: a bare list of entries.
UNVERSIONED = "none"
_KEYS_NOT_YET: dict[str, frozenset[str]] = {
    "2.10": frozenset(),
    "2.9": frozenset(),
    "2.4": _THREAD,
    "2.1": _THREAD | {"timeout_ms"},
    "1.4": _THREAD | {"timeout_ms"} | _NAMED,
    UNVERSIONED: _THREAD | {"timeout_ms"} | _NAMED | _TIMED,
}
VERSIONS = tuple(_KEYS_NOT_YET)
_ONE_NUMBER = frozenset({"1.4", UNVERSIONED})


def as_version(dump: Dump, version: str) -> Any:
    """Return a dump of version 2.10 as torch wrote it when the format was at `version`, one of `VERSIONS`."""
    if version == "2.10":
        return dump
    old = {key: value for key, value in dump.items() if key not in ("comm_lib_version", "pg_status")}
    old["version"] = version
    if version == "2.9":
        old["nccl_version"] = dump["comm_lib_version"]
    if version in ("2.9", "2.4"):
        old["pg_status"] = dump["pg_status"]
    if version == "1.4":
        # Local ids go by the order in which groups were made, and so named; they are listed by their names as text.
        named = sorted(dump["pg_config"], key=int)
        old["pg_config"] = {
            int(local_id): json.loads(dump["pg_config"][name]["ranks"])
            for local_id, name in zip(dump["pg_status"], named, strict=True)
        }
    old["entries"] = [_older_entry(entry, version) for entry in dump["entries"]]
    if version in _ONE_NUMBER:
        _number_alike(dump["entries"], old["entries"])
    return old["entries"] if version == UNVERSIONED else old


def _older_entry(entry: Dump, version: str) -> Dump:
    old = {key: value for key, value in entry.items() if key not in _KEYS_NOT_YET[version]}
    if version == UNVERSIONED:
        old["time_created_us"] = entry["time_created_ns"] // 1000
    return old


def _number_alike(entries: Sequence[Dump], old_entries: Sequence[Dump]) -> None:
    """Give collectives, sends and recvs one kind of number each, and the end of a batch that of the batch."""
    batch: int | None = None
    for entry, old in zip(entries, old_entries, strict=True):
        closes = batch == entry["p2p_seq_id"] and entry["profiling_name"].endswith(":coalesced")
        is_p2p = entry["is_p2p"] or closes
        old["seq_id"] = entry["p2p_seq_id"] if is_p2p else entry["collective_seq_id"]
        batch = entry["p2p_seq_id"] if entry["is_p2p"] else None


def as_json(dump: Dump) -> Dump:
    """Return a dump as torch's JSON writers spell it: no frames, counters as strings, 0 for a missing time."""
    entries = [
        {key: 0 if value is None else value for key, value in entry.items() if key != "frames"}
        for entry in dump["entries"]
    ]
    spelled = {**dump, "entries": entries}
    if "pg_status" in dump:
        spelled["pg_status"] = {
            local_id: {key: str(value) for key, value in status.items()}
            for local_id, status in dump["pg_status"].items()
        }
    if not entries:
        del spelled["entries"]
    return spelled


def to_pickle(dump: Any) -> bytes:
    """Return a dump as the bytes of a file: a pickle of protocol 2, as torch writes."""
    return pickle_safe.dump(dump)


def to_json(dump: Any) -> bytes:
    """Return a dump as the bytes of a JSON file."""
    return json.dumps(as_json(dump)).encode()
