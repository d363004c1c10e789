"""The publisher: what reaches the store, when it is tried again, what a restart finds. Time is passed in."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from fr_exporter.config import load
from fr_exporter.errors import StoreError
from fr_exporter.fleet.layout import Place, object_name
from fr_exporter.fleet.objectstore import ObjectStore
from fr_exporter.fleet.outlet import Outlet
from fr_exporter.fleet.publisher import ObjectWriter, Publisher
from fr_exporter.fleet.spool import Spool
from fr_exporter.metrics.telemetry import Telemetry
from fr_exporter.model import DumpSet, NodeRecords, UnreadableFile

URL = "file:///store"
N1, N2, N3 = (Place("job", 0, f"n{number}") for number in (1, 2, 3))


class Store:
    """A store in memory: `up`, `down`, `denied`, `answer lost` or `fault`; `attempts` are when it was tried."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.objects: dict[str, bytes] = {}
        self.health = "up"
        self.denied: set[str] = set()
        self.attempts: list[float] = []
        self._clock = clock

    def write(self, path: str, data: bytes) -> None:
        """Write an object, or fail as the health says."""
        self.attempts.append(self._clock())
        if self.health in ("up", "answer lost") and path not in self.denied:
            self.objects[path] = data
        if self.health == "denied" or path in self.denied:
            raise StoreError(f"{path}: access denied", denied=True)
        if self.health == "fault":
            raise RuntimeError("a fault of the driver")
        if self.health != "up":
            raise StoreError(f"{path}: no answer", denied=False)


class HangingStore(Store):
    """A store that answers no write before it is let go."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.entered = threading.Event()
        self.let_go = threading.Event()

    def write(self, path: str, data: bytes) -> None:
        """Hang, then write."""
        self.entered.set()
        assert self.let_go.wait(60.0)
        super().write(path, data)


def records(place: Place, content: str) -> NodeRecords:
    """Return records of a place that differ by their content."""
    unreadable = UnreadableFile(file="f", rank=None, error=content, result="partial")
    return NodeRecords(place.training_job, place.attempt, place.node, dumps=(), unreadable=(unreadable,))


def encode(node: NodeRecords) -> bytes:
    """Return the content; one that is empty cannot be encoded."""
    if not node.unreadable[0].error:
        raise ValueError("a fault of ours")
    return node.unreadable[0].error.encode()


def stamp(data: bytes, sent_ns: int) -> bytes:
    """Return the object with its time."""
    return data + b"@%d" % sent_ns


@dataclass
class Bench:
    """A publisher on a bench: a clock that moves when told to, and what it counted."""

    spool_dir: Path
    max_bytes: int = 2**20
    jitter: float = 1.0
    now: float = 0.0
    store: Store = field(init=False)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        self.store = Store(lambda: self.now)
        self.telemetry = Telemetry(self.registry)
        self.start()

    def start(self) -> None:
        """Start a process: a spool and a publisher on the same directory."""
        self.spool = Spool(str(self.spool_dir), URL, self.max_bytes)
        self.publisher = Publisher(
            self.store,
            self.spool,
            self.telemetry,
            encode=encode,
            stamp=stamp,
            clock=lambda: self.now,
            wall_ns=lambda: round(self.now * 1000),
            jitter=lambda: self.jitter,
        )

    def restart(self) -> None:
        """End the process and start another."""
        self.spool.close()
        self.start()

    def offer(self, place: Place, content: str) -> None:
        """Offer records that were read just now."""
        self.publisher.offer(place, records(place, content), self.now)

    def work(self) -> float:
        """Do all that is due now; return when something is due next."""
        while (due := self.publisher.step()) <= self.now:
            pass
        return due

    def wait(self, seconds: float) -> None:
        """Let time pass, and the publisher do what is due meanwhile."""
        end = self.now + seconds
        while (due := self.work()) <= end:
            self.now = due
        self.now = end

    def published(self) -> dict[str, str]:
        """Return what the store holds, without the times."""
        return {path: data.decode().partition("@")[0] for path, data in self.store.objects.items()}

    def count(self, name: str, **labels: str) -> float | None:
        """Return the value of a series."""
        return self.registry.get_sample_value(f"fr_exporter_publish_{name}", labels)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Return a bench whose store is up."""
    made = Bench(tmp_path)
    yield made
    made.spool.close()


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """Return what was logged."""
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_records_are_published_at_once_with_the_time_of_sending(bench: Bench) -> None:
    """An object has its place's name and the wall clock at its upload; the delay counts from the reading."""
    bench.offer(N1, "a")
    bench.now = 2.5
    bench.work()
    assert bench.store.objects == {object_name(N1): b"a@2500"}
    assert (bench.count("total", result="published"), bench.count("spool_files")) == (1, 0)
    assert (bench.count("delay_seconds_count"), bench.count("delay_seconds_sum")) == (1, 2.5)


def test_every_result_is_counted_from_zero(bench: Bench) -> None:
    """All series are there before anything is published, or where nothing ever is."""
    results = ("published", "failed", "denied", "dropped")
    assert [bench.count("total", result=result) for result in results] == [0, 0, 0, 0]
    assert (bench.count("spool_files"), bench.count("delay_seconds_count")) == (0, 0)


def test_only_the_latest_of_a_place_is_published_and_nothing_twice(bench: Bench) -> None:
    """Offers overtake each other; what the store has is not sent again, and a return to former records is."""
    for content in ("a", "b", "b", "a", "a"):
        bench.offer(N1, "overtaken")
        bench.offer(N1, content)
        bench.work()
        assert bench.published() == {object_name(N1): content}
    assert len(bench.store.attempts) == 3


@pytest.mark.parametrize(("jitter", "share"), [(1.0, 1.0), (0.0, 0.5)])
def test_a_store_that_is_down_is_not_hammered(bench: Bench, jitter: float, share: float) -> None:
    """The waits double from half a second to half a minute, half of each by chance; offers do not shorten them."""
    bench.jitter = jitter
    bench.store.health = "down"
    while bench.now < 150.0 * share:
        bench.offer(N1, str(bench.now))
        bench.wait(0.125 * share)
    waits = [later - earlier for earlier, later in pairwise(bench.store.attempts)]
    assert waits == [share * wait for wait in (0.5, 1, 2, 4, 8, 16, 30, 30, 30)]


def test_an_outage_of_days_loses_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """After it the first to be tried again brings the newest of all places along, and two lines tell of it."""
    caplog.set_level(logging.INFO)
    bench.store.health = "down"
    for content in ("first", "second"):
        for place in (N1, N2, N3):
            bench.offer(place, f"{content} {place.node}")
            bench.wait(86_407.0)
    failures = len(bench.store.attempts)
    assert bench.count("spool_files") == 3
    bench.store.health = "up"
    bench.now = bench.work()
    bench.work()
    assert bench.published() == {object_name(place): f"second {place.node}" for place in (N1, N2, N3)}
    assert bench.count("total", result="failed") == failures
    assert (bench.count("total", result="published"), bench.count("spool_files")) == (3, 0)
    outage = (logging.WARNING, f"publishing fails, and is tried again until it works: {object_name(N1)}: no answer")
    assert said(caplog) == [outage, (logging.INFO, "publishing works again, nothing is left to publish")]
    bench.store.health = "down"
    bench.offer(N1, "third")
    assert bench.work() == bench.now + 0.5, "a new outage begins with the shortest wait"
    assert said(caplog)[2:] == [outage]


def test_an_object_that_is_denied_holds_no_other_back(bench: Bench) -> None:
    """What the store refuses for good is tried again and counted as denied, while the others pass it at once."""
    bench.store.denied = {object_name(N1)}
    for content in ("a", "b"):
        for place in (N1, N2, N3):
            bench.offer(place, content)
        bench.work()
        assert bench.published() == {object_name(N2): content, object_name(N3): content}
        bench.wait(10.0)
    denied = bench.count("total", result="denied")
    assert denied is not None
    assert denied == len(bench.store.attempts) - 4
    assert bench.count("spool_files") == 1
    bench.store.denied = set()
    bench.wait(30.0)
    assert bench.published() == {object_name(place): "b" for place in (N1, N2, N3)}


def test_a_store_that_fails_in_an_unknown_way_is_tried_again(bench: Bench) -> None:
    """What no driver should raise is for the log of the thread; it counts as failed and has the same backoff."""
    bench.store.health = "fault"
    bench.offer(N1, "a")
    with pytest.raises(RuntimeError, match="a fault of the driver"):
        bench.work()
    bench.store.health = "up"
    assert bench.work() == 0.5
    bench.wait(0.5)
    assert bench.published() == {object_name(N1): "a"}
    assert (bench.count("total", result="failed"), bench.count("total", result="published")) == (1, 1)


def test_a_restart_publishes_what_was_left(bench: Bench) -> None:
    """The next process sends it first, by its own clock; how long that took is no delay of the publisher."""
    bench.store.health = "down"
    bench.offer(N1, "a")
    bench.wait(1.0)
    bench.store.health = "up"
    bench.restart()
    bench.now = 5.0
    bench.work()
    assert bench.store.objects == {object_name(N1): b"a@5000"}
    assert (bench.count("total", result="published"), bench.count("delay_seconds_count")) == (1, 0)
    bench.restart()
    assert bench.work() == float("inf")
    assert len(bench.store.attempts) == 3


def test_two_exporters_of_a_node_share_the_directory_of_the_spool(tmp_path: Path) -> None:
    """Each publishes its own while the other lives; what one leaves behind, the next to start publishes."""
    one, other = Bench(tmp_path), Bench(tmp_path)
    for bench, place in ((one, N1), (other, N2)):
        bench.store.health = "down"
        bench.offer(place, "a")
        bench.offer(N3, place.node)
        bench.wait(1.0)
    one.store.health = "up"
    one.wait(30.0)
    assert one.published() == {object_name(N1): "a", object_name(N3): "n1"}
    one.restart()
    other.spool.close()
    one.wait(30.0)
    assert object_name(N2) not in one.published()
    one.restart()
    third = Bench(tmp_path)
    one.wait(30.0)
    third.wait(30.0)
    assert one.published() | third.published() == {object_name(N1): "a", object_name(N2): "a", object_name(N3): "n2"}
    for bench in (one, third):
        bench.spool.close()


def test_a_full_spool_drops_the_oldest_and_counts_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The newest survive an outage, the number of those dropped is a metric, and one line says what to do."""
    bench = Bench(tmp_path, max_bytes=8)
    bench.store.health = "down"
    for place in (N1, N2, N3, N1):
        bench.offer(place, "1234")
        bench.work()
    bench.store.health = "up"
    bench.wait(30.0)
    assert bench.published() == {object_name(N3): "1234", object_name(N1): "1234"}
    assert bench.count("total", result="dropped") == 2
    assert [line for _, line in said(caplog) if "spool" in line] == [
        "the spool is full, the oldest records are dropped; raise publish.spool_max_bytes to keep them"
    ]
    bench.spool.close()


def test_after_a_lost_answer_nothing_is_taken_for_granted(tmp_path: Path) -> None:
    """What was dropped may have arrived: records that were published before it are published again."""
    bench = Bench(tmp_path, max_bytes=8)
    for health, place, content in (
        ("up", N1, "old"),
        ("answer lost", N1, "new"),
        ("down", N2, "1234"),
        ("down", N3, "1234"),
        ("up", N1, "old"),
    ):
        bench.store.health = health
        bench.offer(place, content)
        bench.work()
    bench.wait(30.0)
    assert bench.published()[object_name(N1)] == "old"
    bench.spool.close()


def test_without_a_disk_all_is_published_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The spool's directory cannot be made: an outage costs nothing as long as the process lives."""
    (tmp_path / "file").touch()
    bench = Bench(tmp_path / "file" / "spool")
    bench.store.health = "down"
    bench.offer(N1, "a")
    bench.offer(N2, "a")
    bench.wait(60.0)
    bench.store.health = "up"
    bench.wait(30.0)
    assert bench.published() == {object_name(N1): "a", object_name(N2): "a"}
    assert [line.partition(":")[0] for _, line in said(caplog)] == [
        "publish.spool_dir",
        "publishing fails, and is tried again until it works",
    ]


@contextmanager
def running(store: ObjectWriter, spool_dir: Path) -> Iterator[Publisher]:
    """Run a publisher in its thread, by a clock that stands still; at the end it must end."""
    spool = Spool(str(spool_dir), URL, 2**20)
    telemetry = Telemetry(CollectorRegistry())
    publisher = Publisher(store, spool, telemetry, encode=encode, stamp=stamp, clock=lambda: 0.0, wall_ns=lambda: 1)
    thread = threading.Thread(target=publisher.run, daemon=True)
    thread.start()
    yield publisher
    publisher.close()
    thread.join(60.0)
    assert not thread.is_alive()


def test_offers_return_while_the_store_hangs(tmp_path: Path) -> None:
    """Nobody waits for the store but the publisher's own thread; when it answers, the latest follows."""
    store = HangingStore()
    with running(store, tmp_path) as publisher:
        publisher.offer(N1, records(N1, "first"), 0.0)
        assert store.entered.wait(60.0)
        for number in range(1000):
            publisher.offer(N1, records(N1, str(number)), 0.0)
        assert not publisher.drain(0.0)
        store.let_go.set()
        assert publisher.drain(60.0)
    assert store.objects == {object_name(N1): b"999@1"}
    assert len(store.attempts) == 2


def test_what_was_offered_while_the_store_hangs_is_left_to_the_next_process(tmp_path: Path) -> None:
    """The store answers no more before the end, and after it: the next process finds the latest of each place."""
    store = HangingStore()
    with running(store, tmp_path) as publisher:
        publisher.offer(N1, records(N1, "first"), 0.0)
        assert store.entered.wait(60.0)
        publisher.offer(N1, records(N1, "latest"), 0.0)
        publisher.offer(N2, records(N2, ""), 0.0)
        publisher.offer(N3, records(N3, "other"), 0.0)
        assert not publisher.drain(0.0)
        publisher.close()
        publisher.leave()
        store.let_go.set()
    left = Spool(str(tmp_path), URL, 2**20)
    assert {name: waiting.data for place in (N1, N2, N3) if (waiting := left.get(name := object_name(place)))} == {
        object_name(N1): b"latest",
        object_name(N3): b"other",
    }
    left.close()


def test_the_end_does_not_wait_for_a_backoff(tmp_path: Path) -> None:
    """By a clock that stands still no retry is ever due: to drain makes one more attempt at once."""
    store = Store(lambda: 0.0)
    store.health = "down"
    with running(store, tmp_path) as publisher:
        publisher.offer(N1, records(N1, "a"), 0.0)
        assert not publisher.drain(0.05)
        store.health = "up"
        assert publisher.drain(60.0)
    assert store.objects == {object_name(N1): b"a@1"}


@pytest.mark.parametrize("training_job", ["日" * 60, "job\udcff"])
def test_a_directory_whose_name_no_object_can_have_is_not_published(
    training_job: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory that is discovered may have any name: the log says so once, and nothing waits for ever."""
    text = "{targets: [{path: /dumps, discover: true}], publish: {url: 'file:///nowhere'}}"
    options = load(text, env={"TMPDIR": str(tmp_path), "NODE_NAME": "n"}, home="")
    outlet = Outlet(options.publish, options.topology, Telemetry(CollectorRegistry()))
    outlet.start()
    for _ in range(2):
        outlet.publish(DumpSet(training_job=training_job, source="", scope="node", dumps={}))
    outlet.stop(60.0)
    [(level, line)] = said(caplog)
    assert level == logging.WARNING
    assert line.startswith(f"training job {training_job} is not published: the name ")


def test_a_shared_directory_that_is_mounted_late_gets_everything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the real store: while its directory is not there the log says what to do, then each object is a file."""
    shared = tmp_path / "shared"
    with running(ObjectStore(f"file://{shared}"), tmp_path / "spool") as publisher:
        for place in (N1, N2):
            publisher.offer(place, records(place, f"of {place.node}"), 0.0)
        while not caplog.records:
            assert not publisher.drain(0.05)
        shared.mkdir()
        assert publisher.drain(60.0)
    found = {str(path.relative_to(shared)): path.read_bytes() for path in shared.rglob("*") if path.is_file()}
    assert found == {object_name(N1): b"of n1@1", object_name(N2): b"of n2@1"}
    assert caplog.records[0].getMessage().endswith("the directory does not exist; make it, or mount it")


def test_a_fault_of_ours_in_one_record_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Records that cannot be encoded are logged with their traceback; the thread goes on with all others."""
    store = Store(lambda: 0.0)
    with running(store, tmp_path) as publisher:
        for place, content in ((N1, "a"), (N2, ""), (N3, "a")):
            publisher.offer(place, records(place, content), 0.0)
        assert publisher.drain(60.0)
        publisher.offer(N2, records(N2, "b"), 0.0)
        assert publisher.drain(60.0)
    assert store.objects == {object_name(N1): b"a@1", object_name(N2): b"b@1", object_name(N3): b"a@1"}
    assert [record.exc_info is not None for record in caplog.records] == [True]


PLACES = st.sampled_from([N1, N2, N3])
ACTIONS = st.one_of(
    st.tuples(st.just("offer"), PLACES, st.sampled_from(["a", "b", "c"])),
    st.tuples(st.just("store"), PLACES, st.sampled_from(["up", "down", "denied", "answer lost"])),
    st.tuples(st.just("wait"), PLACES, st.sampled_from(["0.5", "3", "40"])),
    st.tuples(st.sampled_from(["step", "restart"]), PLACES, st.just("")),
)


@given(st.lists(ACTIONS, max_size=30))
def test_whatever_happened_a_store_that_works_gets_the_latest_of_each_place(
    actions: list[tuple[str, Place, str]],
) -> None:
    """Failures, lost answers and restarts in any order: at the end the store is exact and the spool empty."""
    expected: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        for action, place, word in actions:
            if action == "offer":
                bench.offer(place, word)
                expected[object_name(place)] = word
            elif action == "store":
                bench.store.health = word
            elif action == "wait":
                bench.wait(float(word))
            elif action == "step":
                bench.publisher.step()
            else:
                # Only what was taken in is the spool's to keep.
                bench.work()
                bench.restart()
        bench.store.health = "up"
        bench.wait(60.0)
        assert bench.published() == expected
        assert bench.count("spool_files") == 0
        assert [path for path in Path(directory).rglob("*") if path.is_file()] == []
        bench.spool.close()
