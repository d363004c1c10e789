"""The records of one job, fetched once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from fr_exporter.errors import StoreError, UsageError
from fr_exporter.fleet.attempts import Attempts
from fr_exporter.fleet.layout import parse_name
from fr_exporter.fleet.listing import list_job
from fr_exporter.fleet.objectstore import ObjectInfo, ObjectStore
from fr_exporter.model import UnreadableFile
from fr_exporter.pipeline import Fetched
from fr_exporter.text import shown_url

_THREADS = 16


def fetch_job(url: str, max_object_bytes: int) -> list[Fetched | UnreadableFile]:
    """Return the objects of a job, those of the attempt that counts, or why one cannot be fetched.

    `url` is that of the job: the one that its nodes publish to, and its name. Raises UsageError where there are none.
    """
    base, _, folder = url.rstrip("/").rpartition("/")
    store = ObjectStore(base)
    training_job = parse_name(folder)
    shown = shown_url(url).rstrip("/")
    try:
        listing = list_job(store, folder, Attempts())
    except StoreError as error:
        raise UsageError(str(error)) from error
    if training_job is None or listing.attempt is None:
        raise UsageError(f"{shown}: no records; give the URL that nodes publish to, and behind it the training job")
    attempt = listing.attempt

    def fetch(path: str, info: ObjectInfo) -> Fetched | UnreadableFile:
        address = f"{shown_url(base)}/{path}"
        if info.size == 0:
            return UnreadableFile(address, None, "empty: it holds no records", "partial")
        try:
            data = store.read(path, max_object_bytes)
        except StoreError as error:
            return UnreadableFile(address, None, str(error), "unreadable")
        return Fetched(address, training_job, attempt, parse_name(info.name) or info.name, data, info.mtime_ns)

    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(fetch, listing.objects, listing.objects.values()))
