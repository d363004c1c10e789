"""What a scrape reads."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread

from fr_exporter.store import Store
from tests.unit.diagnosis_values import ANALYSED, SECOND, device_stall, incident, target


def test_latest_state_of_each_target_by_key() -> None:
    """An update takes the place of the last one; a forgotten target is gone, an unknown one no error."""
    store = Store(history=5)
    idle, hung = target(training_job="b"), target(device_stall())
    store.update("b", idle)
    store.update("a", idle)
    store.update("a", hung)
    assert store.snapshot().targets == (hung, idle)
    store.forget("a")
    store.forget("a")
    assert store.snapshot().targets == (idle,)


def test_history_holds_the_newest_incidents_first() -> None:
    """Beyond `history` the oldest go; one recorded again takes its own place."""
    store = Store(history=2)
    first, second, third = (
        incident(device_stall(), id=str(number), opened_at_ns=ANALYSED + number * SECOND) for number in range(3)
    )
    for entry in (first, second, third):
        store.record(entry)
    assert store.snapshot().incidents == (third, second)
    closed = replace(second, closed_at_ns=ANALYSED + 9 * SECOND)
    store.record(closed)
    assert store.snapshot().incidents == (third, closed)


def test_forgotten_target_leaves_its_incidents() -> None:
    """The history outlives the directory that it came from."""
    store = Store(history=2)
    entry = incident(device_stall())
    store.update("a", target(device_stall()))
    store.record(entry)
    store.forget("a")
    assert store.snapshot().incidents == (entry,)


def test_snapshot_is_a_copy_and_threads_lose_nothing() -> None:
    """A snapshot stays as it was taken, and what several threads record is all there."""
    store = Store(history=400)
    before = store.snapshot()
    entries = [incident(device_stall(), id=str(number)) for number in range(400)]

    def record(part: int) -> None:
        for entry in entries[part::4]:
            store.record(entry)

    threads = [Thread(target=record, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert before.incidents == ()
    assert {entry.id for entry in store.snapshot().incidents} == {entry.id for entry in entries}
