"""Which directories can be watched, when to list them again, and which files changed in between.

Events only say that a path changed: they are never trusted further, since torch truncates and writes in place, queues
overflow, and a network file system shows no change made on another host.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from watchdog.events import (
    DirCreatedEvent,
    DirDeletedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver, ObservedWatch

from fr_exporter.config import Watch

Backend = Literal["inotify", "polling"]

# A dump is complete when its writer closes it; each write before that would only have us read half of it once more.
# Our own reads must wake nobody either.
_EVENTS: list[type[FileSystemEvent]] = [
    FileCreatedEvent,
    FileClosedEvent,
    FileMovedEvent,
    FileDeletedEvent,
    DirCreatedEvent,
    DirMovedEvent,
    DirDeletedEvent,
]

# inotify sees what this host writes and nothing else; here other hosts write too.
_NETWORK_FILE_SYSTEMS = frozenset(
    ("9p", "beegfs", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "ocfs2", "orangefs", "smb3", "virtiofs", "wekafs")
)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Directory:
    """One directory: `identity` is its device and inode while it is up, `error` the reason while it is down."""

    backend: Backend
    identity: tuple[int, int] | None = None
    watch: ObservedWatch | None = None
    error: str | None = None
    list_at: float = float("-inf")


class Watcher:
    """Keeps a set of directories watched, through their absence and return.

    `changed` is called from the observer's thread with the path of a file or directory that changed; everything else
    belongs to one thread, which passes in its monotonic clock in seconds.
    """

    def __init__(self, options: Watch, changed: Callable[[str], None]) -> None:
        self.options = options
        # A new directory may get the inode of the deleted one: the event alone tells them apart.
        self._deleted: deque[str] = deque()
        self._handler = _Forward(changed, self._deleted.append)
        self._directories: dict[str, _Directory] = {}
        self._transient: frozenset[str] = frozenset()
        self._observer: BaseObserver | None = None
        self._fallback: Backend = "polling" if options.backend == "polling" else "inotify"
        self.deadline = float("-inf")

    def require(self, directories: Iterable[str], transient: Iterable[str] = ()) -> None:
        """Watch exactly these directories from the next `check` on; that a transient one is gone is no news."""
        wanted = set(directories)
        self._transient = frozenset(transient)
        for path in self._directories.keys() - wanted:
            self._unschedule(self._directories.pop(path))
        for path in wanted - self._directories.keys():
            self._directories[path] = _Directory(backend=self._fallback)
            self.deadline = float("-inf")

    def relist(self, path: str) -> None:
        """Have the next `check` return a required directory."""
        self._directories[path].list_at = self.deadline = float("-inf")

    def up(self, path: str) -> bool:
        """Tell whether a required directory is watched."""
        return self._directories[path].identity is not None

    def device(self, path: str) -> int | None:
        """Return the device that a required directory is on; None while it is down."""
        identity = self._directories[path].identity
        return None if identity is None else identity[0]

    def backend(self, path: str) -> Backend:
        """Return how a required directory is watched."""
        return self._directories[path].backend

    def check(self, now: float) -> dict[str, bool]:
        """Return the directories to list now: new, back or replaced (True), or not listed for too long (False)."""
        if now < self.deadline:
            return {}
        while self._deleted:
            deleted = self._directories.get(self._deleted.popleft())
            if deleted is not None:
                deleted.identity = None
        due = {path: self._is_due(path, directory, now) for path, directory in self._directories.items()}
        self.deadline = now + self.options.poll_interval_s
        return {path: fresh for path, fresh in due.items() if fresh is not None}

    def lost(self, path: str, error: OSError) -> None:
        """Note that a directory cannot be read; says so once, and every `check` tries again."""
        directory = self._directories[path]
        self._unschedule(directory)
        directory.identity = None
        if path in self._transient and isinstance(error, FileNotFoundError):
            return
        reason = error.strerror or str(error)
        if directory.error is None:
            every = self.options.poll_interval_s
            log.warning("cannot watch %s: %s; trying again every %g s until it can be read", path, reason, every)
        directory.error = reason

    def close(self) -> None:
        """Stop watching."""
        if self._observer is not None:
            self._observer.stop()
            self._observer.join()

    def _is_due(self, path: str, directory: _Directory, now: float) -> bool | None:
        """Tell whether to list a directory as a fresh one (True) or anew (False); None: not now."""
        try:
            fresh = self._refresh(path, directory)
        except OSError as error:
            self.lost(path, error)
            return None
        if now < directory.list_at and not fresh:
            return None
        polled = directory.backend == "polling"
        directory.list_at = now + (self.options.poll_interval_s if polled else self.options.rescan_interval_s)
        return fresh

    def _refresh(self, path: str, directory: _Directory) -> bool:
        """Watch a directory that is new, back or replaced; tell whether it is."""
        with os.scandir(path):
            status = os.stat(path)
        identity = (status.st_dev, status.st_ino)
        if identity == directory.identity:
            return False
        self._unschedule(directory)
        self._schedule(path, directory, status.st_dev)
        directory.identity = identity
        if directory.error is not None:
            log.info("watching %s: it can be read again", path)
            directory.error = None
        return True

    def _schedule(self, path: str, directory: _Directory, device: int) -> None:
        directory.backend = self._fallback
        if self.options.backend == "auto" and _is_network_file_system(device):
            directory.backend = "polling"
        if directory.backend == "polling":
            return
        try:
            directory.watch = self._start(path)
        except OSError as error:
            if self.options.backend == "inotify" or error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
                raise
            every = self.options.poll_interval_s
            log.warning("inotify cannot be used (%s): polling every %g s instead", error.strerror or error, every)
            self._fallback = directory.backend = "polling"

    def _start(self, path: str) -> ObservedWatch:
        try:
            if self._observer is None:
                observer = Observer()
                observer.start()
                self._observer = observer
            # With the slash the kernel follows a symbolic link to the directory.
            return self._observer.schedule(self._handler, os.path.join(path, ""), event_filter=_EVENTS)
        except RuntimeError as error:  # no memory left for the thread that each watch has
            raise OSError(errno.ENOMEM, str(error)) from error

    def _unschedule(self, directory: _Directory) -> None:
        if self._observer is not None and directory.watch is not None:
            self._observer.unschedule(directory.watch)
        directory.watch = None


class _Forward(FileSystemEventHandler):
    def __init__(self, changed: Callable[[str], None], deleted: Callable[[str], None]) -> None:
        self._changed = changed
        self._deleted = deleted

    def on_any_event(self, event: FileSystemEvent) -> None:
        for path in (event.src_path, event.dest_path):
            if path:
                self._changed(os.fsdecode(path).rstrip("/"))

    def on_deleted(self, event: FileSystemEvent) -> None:
        if event.is_directory:
            self._deleted(os.fsdecode(event.src_path).rstrip("/"))


def _is_network_file_system(device: int) -> bool:
    """Look a device number up in the mount table; False where there is none."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                fields = line.split()
                if fields[2] == number:
                    kind = fields[fields.index("-") + 1]
                    return kind in _NETWORK_FILE_SYSTEMS or kind.startswith("fuse.")
    except OSError:
        pass
    return False
