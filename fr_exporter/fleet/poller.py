"""The thread that looks at a store for what node exporters published, so that a store that is down delays nothing."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from fr_exporter.config import Target
from fr_exporter.errors import StoreError
from fr_exporter.fleet.attempts import Attempts
from fr_exporter.fleet.discovery import Discovery
from fr_exporter.fleet.layout import parse_name, quoted
from fr_exporter.fleet.listing import Listing, RecordStore, list_job
from fr_exporter.fleet.objects import Batch, Objects
from fr_exporter.fleet.pool import Pool
from fr_exporter.fleet.retention import Retention
from fr_exporter.model import UnreadableFile
from fr_exporter.pipeline import Fetched
from fr_exporter.text import shown_url

if TYPE_CHECKING:
    from fr_exporter.fleet.objectstore import ObjectInfo

# What one batch holds at most, so that memory stays bounded: objects, and bytes where it is more than one.
_BATCH_OBJECTS = 256
_BATCH_BYTES = 64 * 2**20
_THREADS = 16
# Longer than the store's own deadline: what takes so long hangs in the system.
_PATIENCE_S = 40.0

Act = Callable[[], None]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Followed:
    """A job whose objects are read: the token of each object that it was given, and whether it was last listed."""

    training_job: str
    objects: Objects
    tokens: dict[str, tuple[str, ...]] = field(default_factory=dict)
    up: bool | None = None


@dataclass(frozen=True, slots=True)
class _Wanted:
    """An object to fetch."""

    job: _Followed
    attempt: int
    path: str
    info: ObjectInfo


class Poller:
    """Looks at the URL of one target, in a thread of its own. All methods but `poll` are for the worker's thread.

    A poll lists the jobs where the target discovers them, and of each job that is alive its attempts, the objects of
    the one that counts and those of another in turn; of the jobs that are not alive it lists a few. So it makes at most
    1 + 4 × (live jobs + 16) requests, one more for every further page of a listing, one for each object that changed,
    and 64 while old records are removed.

    What is new goes to `hand_over` as calls for the worker's thread to make, each with a call to make once all it
    brought is read; `discovered` is among them, with the names of the jobs that are alive, None where they cannot be
    listed.
    """

    def __init__(
        self,
        target: Target,
        url: str,
        *,
        open_store: Callable[[str], RecordStore],
        hand_over: Callable[[Act, Act], None],
        discovered: Callable[[tuple[str, ...] | None], None],
        interval_s: float,
        max_object_bytes: int,
        clock: Callable[[], float],
        wall_ns: Callable[[], int],
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._open_store = partial(open_store, url)
        self._shown_url = shown_url(url).rstrip("/")
        self._hand_over = hand_over
        self._discovered = discovered
        self._interval_s = interval_s
        self._max_object_bytes = max_object_bytes
        self._clock = clock
        self._wall_ns = wall_ns
        self._pool = Pool(self._shown_url, _THREADS, patience_s)
        self._store: RecordStore | None = None
        self._discovery = Discovery(int(target.discover_ttl_s * 1e9)) if target.discover else None
        self._told: tuple[tuple[str, ...] | None, ...] = ()
        job = None if target.training_job is None else quoted(target.training_job)
        retention_s = target.retention_s
        self._retention = None if retention_s is None else Retention(self._shown_url, job, retention_s)
        # By folder. Only the worker's thread changes it, and it puts another one in its place.
        self._jobs: Mapping[str, _Followed] = {}
        self._attempts: dict[str, Attempts] = {}
        self._failing: set[str] = set()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._taken = threading.Event()
        self._hurried: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._closed = False

    def place(self, training_job: str) -> str:
        """Return the URL of a job's records, as it is shown."""
        return self._url(quoted(training_job))

    def start(self) -> None:
        """Poll in a thread from now on, if there is none yet."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="poller", daemon=True)
            self._thread.start()

    def follow(self, training_job: str, objects: Objects) -> None:
        """Bring everything that is there of a job, and from then on what changes."""
        self._jobs = {**self._jobs, quoted(training_job): _Followed(training_job, objects)}
        self._wake.set()

    def unfollow(self, training_job: str) -> None:
        """Bring nothing more of a job."""
        self._jobs = {folder: job for folder, job in self._jobs.items() if job.training_job != training_job}

    def hurry(self, done: Callable[[], None]) -> None:
        """Poll at once, and call `done` when all that is there now was handed over."""
        self._hurried.put(done)
        self._wake.set()

    def close(self) -> None:
        """End the thread soon."""
        self._closed = True
        self._wake.set()
        self._taken.set()

    def poll(self) -> Iterator[Act]:
        """Look once; yield what the worker's thread has to do, each before the next is asked for."""
        try:
            if self._store is None:
                self._store = self._pool.result(self._open_store)
            yield from self._look(self._store)
            if self._retention is not None:
                self._retention.step(self._store, self._pool, now=self._clock(), wall_ns=self._wall_ns())
        except StoreError as error:
            self._note(self._shown_url, error)
            yield from self._tell(None)
            yield from _together(self._lose(self._jobs.values()))
        else:
            self._note(self._shown_url, None)

    def _look(self, store: RecordStore) -> Iterator[Act]:
        listings = self._list(store)
        if self._discovery is not None:
            names = (parse_name(folder) for folder in self._discovery.live)
            # The jobs that are new are followed when this is done.
            yield from self._tell(tuple(name for name in names if name is not None))
        acts: list[Act] = []
        wanted: list[_Wanted] = []
        for folder, job in self._jobs.items():
            listing = listings.get(folder)
            if isinstance(listing, StoreError):
                acts += self._lose([job])
            elif listing is not None:
                changed = list(_changed(job, listing))
                wanted += changed
                acts += self._compare(job, listing, more=bool(changed))
        yield from _together(acts)
        yield from self._fetch(store, wanted)

    def _list(self, store: RecordStore) -> dict[str, Listing | StoreError]:
        """List the jobs that are followed, or, with discovery, those that it asks for."""
        if self._discovery is None:
            return {folder: self._pool.result(self._listing_of(store, folder)) for folder in self._jobs}
        there = self._pool.result(partial(store.folders, ""))
        self._attempts = {folder: attempts for folder, attempts in self._attempts.items() if folder in there}
        folders = self._discovery.candidates(folder for folder in there if parse_name(folder) is not None)
        outcomes = self._pool.results([self._listing_of(store, folder) for folder in folders])
        for folder, outcome in zip(folders, outcomes, strict=True):
            if isinstance(outcome, StoreError):
                self._note(self._url(folder), outcome)
                self._discovery.judge_unlisted(folder)
            else:
                self._note(self._url(folder), None)
                self._discovery.judge(folder, outcome.newest_ns, self._wall_ns())
        return dict(zip(folders, outcomes, strict=True))

    def _listing_of(self, store: RecordStore, folder: str) -> Callable[[], Listing]:
        return partial(list_job, store, folder, self._attempts.setdefault(folder, Attempts()))

    def _tell(self, names: tuple[str, ...] | None) -> Iterator[Act]:
        """Yield what tells which jobs are alive, where that is news."""
        if self._discovery is not None and self._told != (names,):
            self._told = (names,)
            yield partial(self._discovered, names)

    def _compare(self, job: _Followed, listing: Listing, *, more: bool) -> Iterator[Act]:
        """Forget what is gone, and yield what tells the job so, where there is something to tell."""
        kept = {path: token for path, token in job.tokens.items() if path in listing.objects}
        if not job.up or len(kept) != len(job.tokens):
            job.up, job.tokens = True, kept
            yield partial(job.objects.listed, frozenset(map(self._url, listing.objects)), more=more)

    def _lose(self, jobs: Iterable[_Followed]) -> Iterator[Act]:
        for job in jobs:
            if job.up is not False:
                job.up = False
                yield job.objects.lost

    def _fetch(self, store: RecordStore, wanted: Sequence[_Wanted]) -> Iterator[Act]:
        """Fetch objects, and yield what gives them to their jobs, a batch at a time."""
        left = Counter(each.job.training_job for each in wanted)
        for part in _parts(wanted):
            outcomes = self._pool.results([partial(self._fetch_one, store, each) for each in part])
            by_job: dict[str, list[tuple[_Wanted, Fetched | UnreadableFile]]] = {}
            for each, outcome in zip(part, outcomes, strict=True):
                brought = self._unfetched(each, outcome) if isinstance(outcome, StoreError) else outcome
                by_job.setdefault(each.job.training_job, []).append((each, brought))
            acts = []
            for training_job, of_job in by_job.items():
                left[training_job] -= len(of_job)
                acts.append(_give(of_job, more=left[training_job] > 0))
            yield from _together(acts)

    def _fetch_one(self, store: RecordStore, wanted: _Wanted) -> Fetched | UnreadableFile:
        url, info = self._url(wanted.path), wanted.info
        if info.size > self._max_object_bytes:
            why = f"refused: {info.size} bytes, limits.max_dump_bytes allows {self._max_object_bytes}"
            return UnreadableFile(url, None, why, "rejected")
        if info.size == 0:
            return UnreadableFile(url, None, "empty: it holds no records", "partial")
        try:
            data = store.read(wanted.path, self._max_object_bytes)
        except MemoryError:
            return UnreadableFile(url, None, "needs more memory than limits.max_memory leaves", "rejected")
        node = parse_name(info.name) or info.name
        return Fetched(url, wanted.job.training_job, wanted.attempt, node, data, info.mtime_ns)

    def _unfetched(self, wanted: _Wanted, error: StoreError) -> UnreadableFile:
        url = self._url(wanted.path)
        why = str(error).removeprefix(f"{url}: ")
        return UnreadableFile(url, None, f"cannot be fetched: {why}", "unreadable")

    def _url(self, path: str) -> str:
        return f"{self._shown_url}/{path}"

    def _note(self, place: str, error: StoreError | None) -> None:
        """Say once that a place cannot be read, and once that it can be again."""
        if error is None and place in self._failing:
            self._failing.remove(place)
            log.info("records in %s can be read again", place)
        elif error is not None and place not in self._failing:
            self._failing.add(place)
            every = self._interval_s
            log.warning("cannot read records: %s; trying again every %g s until they can be read", error, every)

    def _run(self) -> None:
        while not self._closed:
            began = self._clock()
            self._wake.clear()
            hurried = list(_drain(self._hurried))
            try:
                for act in self.poll():
                    self._give_to_worker(act)
                    if self._closed:
                        break
            except Exception:
                log.exception("%s: internal error, please report it", self._shown_url)
                for act in _together(self._lose(self._jobs.values())):
                    self._give_to_worker(act)
            for done in hurried:
                done()
            if self._shown_url in self._failing or self._discovery is None or not self._discovery.in_haste:
                self._wake.wait(max(0.0, began + self._interval_s - self._clock()))
        self._pool.close()

    def _give_to_worker(self, act: Act) -> None:
        """Wait until all is read that came with it: what waits to be read takes memory."""
        self._taken.clear()
        if not self._closed:
            self._hand_over(act, self._taken.set)
            self._taken.wait()


def _changed(job: _Followed, listing: Listing) -> Iterator[_Wanted]:
    if listing.attempt is not None:
        for path, info in listing.objects.items():
            if job.tokens.get(path) != info.token:
                yield _Wanted(job, listing.attempt, path, info)


def _parts(wanted: Iterable[_Wanted]) -> Iterator[list[_Wanted]]:
    """Cut into batches."""
    part: list[_Wanted] = []
    size = 0
    for each in wanted:
        if part and (len(part) == _BATCH_OBJECTS or size + each.info.size > _BATCH_BYTES):
            yield part
            part, size = [], 0
        part.append(each)
        size += each.info.size
    if part:
        yield part


def _give(brought: Sequence[tuple[_Wanted, Fetched | UnreadableFile]], *, more: bool) -> Act:
    """Return what gives a job what was brought; what could not be fetched is tried again next time."""
    job = brought[0][0].job
    failed = tuple(outcome for _, outcome in brought if isinstance(outcome, UnreadableFile))
    fetched = tuple(outcome for _, outcome in brought if isinstance(outcome, Fetched))
    for wanted, outcome in brought:
        if isinstance(outcome, Fetched) or outcome.result != "unreadable":
            job.tokens[wanted.path] = wanted.info.token
    return partial(job.objects.take, Batch(fetched, failed, more))


def _together(acts: Iterable[Act]) -> Iterator[Act]:
    """Yield one act for all of them, where there are any: the worker waits for the end of a burst with each."""
    if kept := list(acts):
        yield partial(_make, kept)


def _make(calls: Iterable[Act]) -> None:
    for call in calls:
        call()


def _drain(calls: SimpleQueue[Act]) -> Iterator[Act]:
    while True:
        try:
            yield calls.get_nowait()
        except Empty:
            return
