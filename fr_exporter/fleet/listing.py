"""What is there of a job: the objects of the attempt that counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fr_exporter.errors import DumpError
from fr_exporter.fleet.attempts import Attempts
from fr_exporter.fleet.layout import parse_attempt, parse_name
from fr_exporter.parsing import record

if TYPE_CHECKING:
    from fr_exporter.fleet.objectstore import ObjectInfo


class RecordStore(Protocol):
    """What is asked of a store whose records are read. All methods raise StoreError."""

    def folders(self, path: str) -> list[str]:
        """Return the names of the folders directly in a folder."""

    def objects(self, path: str) -> list[ObjectInfo]:
        """Return the objects directly in a folder."""

    def read(self, path: str, max_bytes: int) -> bytes:
        """Return what an object holds."""

    def remove(self, path: str) -> None:
        """Remove an object."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The objects of the attempt of a job that counts, by path below the URL."""

    attempt: int | None
    objects: Mapping[str, ObjectInfo]

    @property
    def newest_ns(self) -> int | None:
        """When the newest object was written."""
        return max((info.mtime_ns for info in self.objects.values()), default=None)


def list_job(store: RecordStore, folder: str, attempts: Attempts) -> Listing:
    """Look at the attempts that are due, and return what is there of the one that counts. Raises StoreError."""
    there = [attempt for name in store.folders(folder) if (attempt := parse_attempt(name)) is not None]
    found: dict[int, Mapping[str, ObjectInfo]] = {}
    for attempt in attempts.candidates(there):
        found[attempt] = _list_attempt(store, f"{folder}/{attempt}")
        attempts.judge(attempt, max((info.mtime_ns for info in found[attempt].values()), default=None))
    challenger = attempts.challenger
    if challenger in found:
        path, info = max(found[challenger].items(), key=lambda item: item[1].mtime_ns)
        if not attempts.knows(challenger, info.token):
            attempts.judge_dumps(challenger, info.token, _dumped_ns(store, path, info))
    present = attempts.present
    if present is None:
        return Listing(None, {})
    return Listing(present, found[present] if present in found else _list_attempt(store, f"{folder}/{present}"))


def _list_attempt(store: RecordStore, folder: str) -> Mapping[str, ObjectInfo]:
    return {f"{folder}/{info.name}": info for info in store.objects(folder) if parse_name(info.name) is not None}


def _dumped_ns(store: RecordStore, path: str, info: ObjectInfo) -> int:
    """Return when the newest dump in an object was made, by the clock of the store; 0 where it does not tell."""
    if not 0 < info.size <= record.MAX_BYTES:
        return 0
    try:
        return record.newest_dump_time(store.read(path, info.size), info.mtime_ns) or 0
    except DumpError:
        return 0
