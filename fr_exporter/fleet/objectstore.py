"""The store that records travel through: an object store or a shared directory, by the drivers of fsspec."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fsspec import get_filesystem_class
from fsspec.asyn import FSTimeoutError
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from fr_exporter.errors import FRExporterError, StoreError, UsageError
from fr_exporter.text import shown_url

# The drivers' own timeouts and retries add up to minutes.
_DEADLINE_S = 30

_EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
    "adl": "azure",
}

# What a driver's listing may tell of an object. Any of the first changes with it; the second are when it was written.
_VERSION_KEYS = ("ETag", "etag", "generation", "LastModified", "last_modified", "mtime", "ino", "size")
_TIME_KEYS = ("LastModified", "last_modified", "mtime", "modified", "created")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object as a listing shows it. `token` is another one after every change of the object."""

    name: str
    token: tuple[str, ...]
    mtime_ns: int
    size: int


class ObjectStore:
    """The objects below a URL. Paths are relative to it, "" is the URL itself.

    Credentials and endpoints come the way each driver expects them. An operation waits for a network 30 s at most; a
    shared file system that hangs, hangs it too. Methods raise StoreError, and any thread may call them. Not to be used
    after a fork.
    """

    def __init__(self, url: str) -> None:
        """Prepare for a URL; nothing is asked of the store yet.

        Raises UsageError for a URL that names no store, and where its driver is not installed or not set up.
        """
        self._url = url
        self._files, path = _file_system(url)
        self._base = path.rstrip("/")
        _, _, location = url.partition("://")
        # fsspec would take a relative path from the working directory, and an empty one for the list of all buckets.
        if not self._base or (isinstance(self._files, LocalFileSystem) and not location.startswith("/")):
            raise UsageError(f"{shown_url(url)} names no store; write s3://bucket/path or file:///path")
        # Object stores have no folders to make or to lose, only the bucket has to be there.
        self._has_folders = self._files.root_marker == "/"
        self._root = self._base if self._has_folders else self._base.partition("/")[0]
        self._deadline = {"timeout": _DEADLINE_S} if self._files.async_impl else {}
        self._device: int | None = None

    def folders(self, path: str) -> list[str]:
        """Return the names of the folders directly in a folder, none where it does not exist."""
        return [name for name, entry in self._listing(path) if entry["type"] == "directory"]

    def objects(self, path: str) -> list[ObjectInfo]:
        """Return the objects directly in a folder, none where it does not exist.

        Takes one request for each thousand entries; three in all where there is nothing.
        """
        with self._errors(path):
            return [_object_info(name, entry) for name, entry in self._listing(path) if entry["type"] == "file"]

    def read(self, path: str, max_bytes: int) -> bytes:
        """Return what an object holds. Raises StoreError where that is more than `max_bytes`.

        Not for an object of size 0: stores refuse to send a part of it.
        """
        with self._errors(path):
            data: bytes = self._files.cat_file(self._full(path), start=0, end=max_bytes + 1, **self._deadline)
        if len(data) > max_bytes:
            raise StoreError(f"{self._shown(path)}: larger than {max_bytes} bytes")
        return data

    def write(self, path: str, data: bytes) -> None:
        """Write an object, in place of a former one: who reads meanwhile gets one or the other, whole."""
        with self._errors(path):
            if isinstance(self._files, LocalFileSystem):
                self._check_root()
                _replace_file(self._full(path), data)
            else:
                self._files.pipe_file(self._full(path), data, **self._deadline)

    def remove(self, path: str) -> None:
        """Remove an object, if it is there, and the folders that it leaves empty."""
        with self._errors(path):
            try:
                self._files.rm_file(self._full(path), **self._deadline)
            except FileNotFoundError:
                self._check_root()
            if isinstance(self._files, LocalFileSystem):
                self._remove_empty_folders(path)

    def _listing(self, path: str) -> list[tuple[str, Mapping[str, Any]]]:
        """Return the name and the driver's description of all that is directly in a folder."""
        folder = self._full(path)
        with self._errors(path):
            try:
                entries = self._files.ls(folder, detail=True, **self._deadline)
            except FileNotFoundError:
                self._check_root()
                entries = []
            named = [(entry["name"].removeprefix(f"{folder}/").rstrip("/"), entry) for entry in entries]
            # Drivers also list the folder's own marker, and a file in place of the folder.
            there = [(name, entry) for name, entry in named if name and "/" not in name]
            if isinstance(self._files, LocalFileSystem):
                self._check_device(holds_something=bool(there))
        return there

    def _check_root(self) -> None:
        """Raise StoreError where the bucket or the base directory is gone: that is not the same as nothing in it."""
        if not self._files.exists(self._root, **self._deadline):
            gone = "directory does not exist; make it, or mount it" if self._has_folders else "bucket does not exist"
            raise StoreError(f"{shown_url(self._url)}: the {gone}")

    def _check_device(self, *, holds_something: bool) -> None:
        """Raise StoreError where there is nothing any more, and on another device: the volume is not mounted."""
        device = os.stat(self._base).st_dev
        if holds_something:
            self._device = device
        elif self._device not in (None, device):
            raise StoreError(f"{shown_url(self._url)}: the volume is not mounted any more; mount it")

    def _remove_empty_folders(self, path: str) -> None:
        with suppress(OSError):
            while path := os.path.dirname(path):
                os.rmdir(self._full(path))

    def _full(self, path: str) -> str:
        return f"{self._base}/{path}" if path else self._base

    def _shown(self, path: str) -> str:
        return f"{shown_url(self._url).rstrip('/')}/{path}".rstrip("/")

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        """Turn whatever a driver raises into a StoreError."""
        try:
            yield
        except FRExporterError:
            raise
        # A driver raises the exceptions of its own network library; for the caller each says that the store failed.
        except Exception as error:
            denied = _is_denied(error)
            reason = f"access denied: {_reason(error)}" if denied else _reason(error)
            raise StoreError(f"{self._shown(path)}: {reason}", denied=denied) from error


def _file_system(url: str) -> tuple[Any, str]:
    """Return the driver for a URL, and the path in its terms."""
    protocol, separator, _ = url.partition("://")
    if not separator:
        raise UsageError(f"{url!r} is not a URL such as s3://bucket/path; for a directory write file:///path")
    try:
        get_filesystem_class(protocol)
    except ValueError:
        raise UsageError(f"{shown_url(url)}: {protocol!r} is no protocol of fsspec; s3, gs, az and file are") from None
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        what = f"run pip install 'fr-exporter[{extra}]'" if extra else f"install the fsspec driver for {protocol}"
        raise UsageError(f"{shown_url(url)}: its driver is not installed; {what}") from error
    try:
        files, path = url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    # Each driver has its own way to say that it is not set up.
    except Exception as error:
        raise UsageError(f"{shown_url(url)}: its driver is not set up: {_reason(error)}") from error
    return files, path


def _object_info(name: str, entry: Mapping[str, Any]) -> ObjectInfo:
    token = tuple(str(entry[key]) for key in _VERSION_KEYS if key in entry)
    written = next((entry[key] for key in _TIME_KEYS if key in entry), None)
    if written is None:
        raise StoreError(f"{name}: the driver of this store does not tell when it was written; use another store")
    seconds = written.timestamp() if isinstance(written, datetime) else float(written)
    return ObjectInfo(name, token, int(seconds * 1e9), entry["size"])


def _replace_file(path: str, data: bytes) -> None:
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    # Readers skip what begins with ".". Others must be able to read it, so that the umask decides on its mode.
    temporary = os.path.join(folder, f".{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.remove(temporary)
        raise


def _reason(error: Exception) -> str:
    if isinstance(error, FSTimeoutError):
        return f"no answer in {_DEADLINE_S} s"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    lines = shown_url(text).splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _is_denied(error: Exception) -> bool:
    """Say whether a store refused the credentials or found none, in the words of any driver."""
    status = getattr(error, "status_code", getattr(error, "code", None))
    return (
        isinstance(error, PermissionError)
        or status in (401, 403)
        or re.search("Credential|Authentication", type(error).__name__) is not None
        or str(error).startswith("Forbidden")
    )
