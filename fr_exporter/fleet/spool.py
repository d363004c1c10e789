"""The objects that wait to be published: in memory, and on disk for the next start.

The publisher works from memory, so that a full or broken disk costs only what a crash would lose. Each process has a
directory of its own below `publish.spool_dir`, one of those for its URL. The lock on it ends with the process: then
another one takes the directory over, with what is left in it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import math
import os
from contextlib import suppress
from dataclasses import dataclass, replace

_TEMPORARY = ".new"

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Waiting:
    """An object by the name it will have in the store.

    `read_at` is when its newest dump was read, None where a former process did; it was tried `failures` times in vain,
    and is not tried again before `retry_at`. Times are in seconds of the monotonic clock.
    """

    name: str
    data: bytes
    read_at: float | None
    failures: int = 0
    retry_at: float = -math.inf


class Spool:
    """Holds the latest object of each name, together at most `max_bytes`, though always the newest one.

    Never raises for the disk: what cannot be written is kept in memory, and one warning says so. Belongs to one thread.
    """

    def __init__(self, spool_dir: str, url: str, max_bytes: int) -> None:
        """Take over what a former process left for this URL."""
        self._spool_dir = spool_dir
        self._max_bytes = max_bytes
        self._waiting: dict[str, Waiting] = {}
        self._directory: _Directory | None = None
        self._disk_works = True
        try:
            self._directory = _Directory(spool_dir, url)
            self._waiting = {name: Waiting(name, data, None) for name, data in self._directory.load()}
        except OSError as error:
            self._disk_failed(error)

    def __len__(self) -> int:
        return len(self._waiting)

    def get(self, name: str) -> Waiting | None:
        """Return what waits under a name."""
        return self._waiting.get(name)

    def next(self) -> Waiting:
        """Return what is to be tried next; of those that may be tried at once the oldest."""
        return min(self._waiting.values(), key=lambda waiting: waiting.retry_at)

    def retry_now(self) -> None:
        """Let everything be tried at once."""
        for waiting in self._waiting.values():
            waiting.retry_at = -math.inf

    def put(self, name: str, data: bytes, read_at: float) -> int:
        """Keep an object in place of the former one of its name; return how many others were dropped for it."""
        former = self._waiting.pop(name, Waiting(name, data, read_at))
        # What the store refused it may refuse again: a newer object is not tried sooner.
        self._waiting[name] = replace(former, data=data, read_at=read_at)
        dropped = 0
        while len(self) > 1 and sum(len(waiting.data) for waiting in self._waiting.values()) > self._max_bytes:
            self.remove(next(iter(self._waiting)))
            dropped += 1
        if self._directory is not None:
            try:
                self._directory.write(name, data)
                self._disk_works = True
            except OSError as error:
                self._disk_failed(error)
        return dropped

    def remove(self, name: str) -> None:
        """Forget an object."""
        del self._waiting[name]
        if self._directory is not None:
            try:
                self._directory.remove(name)
            except OSError as error:
                self._disk_failed(error)

    def close(self) -> None:
        """Leave what waits to the next process."""
        if self._directory is not None:
            self._directory.close()

    def _disk_failed(self, error: OSError) -> None:
        if self._disk_works:
            reason = error.strerror or error
            log.warning("publish.spool_dir: %s: %s; until it works a restart loses what waits", self._spool_dir, reason)
        self._disk_works = False


class _Directory:
    """A directory that no other living process uses, with a file for each object. Methods raise OSError.

    A handle holds its lock, and all paths are relative to the handle: whoever may write above the directory cannot put
    another one in its place.
    """

    def __init__(self, spool_dir: str, url: str) -> None:
        self._path, self._handle = _claim(spool_dir, hashlib.sha256(url.encode()).hexdigest()[:16])

    def load(self) -> list[tuple[str, bytes]]:
        """Return names and objects, the oldest first; what is damaged or foreign is left where it is."""
        files = sorted(set(os.listdir(self._handle)) - {_TEMPORARY}, key=self._mtime_ns)
        found = [self._read(file) for file in files]
        ignored = found.count(None)
        if ignored:
            log.warning("publish.spool_dir: ignored %d damaged or foreign files in %s", ignored, self._path)
        return [each for each in found if each is not None]

    def write(self, name: str, data: bytes) -> None:
        """Write an object so that the file holds the former one or this one, whenever the machine stops."""
        with open(_TEMPORARY, "wb", opener=self._open) as file:
            file.write(_pack(name, data))
            file.flush()
            os.fsync(file.fileno())
        os.rename(_TEMPORARY, _file_name(name), src_dir_fd=self._handle, dst_dir_fd=self._handle)
        os.fsync(self._handle)

    def remove(self, name: str) -> None:
        """Remove an object, if it was written."""
        with suppress(FileNotFoundError):
            os.unlink(_file_name(name), dir_fd=self._handle)

    def close(self) -> None:
        """Give the lock back."""
        os.close(self._handle)

    def _read(self, file: str) -> tuple[str, bytes] | None:
        try:
            with open(file, "rb", opener=self._open) as opened:
                record = _unpack(opened.read())
        except OSError:
            return None
        # Nobody would ever remove a copy under another name, and it would be published at every start.
        return record if record is not None and _file_name(record[0]) == file else None

    def _open(self, file: str, flags: int) -> int:
        return os.open(file, flags | os.O_NOFOLLOW, mode=0o600, dir_fd=self._handle)

    def _mtime_ns(self, file: str) -> int:
        return os.stat(file, dir_fd=self._handle, follow_symlinks=False).st_mtime_ns


def _claim(spool_dir: str, key: str) -> tuple[str, int]:
    """Return the first of the directories `key.0`, `key.1` … that no process holds, and the handle that holds it."""
    os.makedirs(spool_dir, mode=0o700, exist_ok=True)
    number = 0
    while True:
        path = os.path.join(spool_dir, f"{key}.{number}")
        os.makedirs(path, mode=0o700, exist_ok=True)
        with suppress(BlockingIOError):
            return path, _lock(path)
        number += 1


def _lock(path: str) -> int:
    """Return a handle that holds the lock of a directory. Raises BlockingIOError where another process does."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"{os.path.basename(path)} in it belongs to another user")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def _file_name(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _pack(name: str, data: bytes) -> bytes:
    content = name.encode() + b"\n" + data
    return hashlib.sha256(content).digest() + content


def _unpack(packed: bytes) -> tuple[str, bytes] | None:
    """Return the name and the object that a file holds; None where it is not whole."""
    size = hashlib.sha256().digest_size
    digest, content = packed[:size], packed[size:]
    if hashlib.sha256(content).digest() != digest:
        return None
    name, _, data = content.partition(b"\n")
    return name.decode(), data
