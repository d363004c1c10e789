"""Calls of a store, many at a time, none of which can hold its caller up for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from fr_exporter.errors import StoreError

T = TypeVar("T")


class Pool:
    """Makes calls in at most `size` threads; an error names the `place` they go to. Belongs to one thread.

    They are daemon threads, which those of an executor are not: one that hangs must not keep the process from its end.
    """

    def __init__(self, place: str, size: int, patience_s: float) -> None:
        self._place = place
        self._size = size
        self._patience_s = patience_s
        self._threads = 0
        self._waiting: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._unfinished: set[Future[Any]] = set()

    def results(self, calls: Sequence[Callable[[], T]]) -> list[T | StoreError]:
        """Return what each call gives, or the StoreError it raises.

        Raises StoreError where none succeeds for `patience_s`, and until those that hang end: threads never pile up.
        """
        self._wait()
        while self._threads < min(self._size, len(calls)):
            threading.Thread(target=self._work, name="store", daemon=True).start()
            self._threads += 1
        futures = [Future[T | StoreError]() for _ in calls]
        self._unfinished = set(futures)
        for task in zip(futures, calls, strict=True):
            self._waiting.put(task)
        self._wait()
        return [future.result() for future in futures]

    def result(self, call: Callable[[], T]) -> T:
        """Return what a call gives. Raises StoreError where it does, or hangs."""
        [outcome] = self.results([call])
        if isinstance(outcome, StoreError):
            raise outcome
        return outcome

    def close(self) -> None:
        """Let the threads end."""
        for _ in range(self._threads):
            self._waiting.put(None)

    def _wait(self) -> None:
        give_up_at = time.monotonic() + self._patience_s
        while self._unfinished:
            timeout_s = max(0.0, give_up_at - time.monotonic())
            done, self._unfinished = wait(self._unfinished, timeout_s, FIRST_COMPLETED)
            # Where each fails only after its own timeout, thousands of them would take hours.
            if not all(isinstance(future.result(), StoreError) for future in done):
                give_up_at = time.monotonic() + self._patience_s
            if not done:
                self._unfinished = {future for future in self._unfinished if not future.cancel()}
                raise StoreError(f"{self._place}: no answer for {self._patience_s:g} s")

    def _work(self) -> None:
        while (task := self._waiting.get()) is not None:
            future, call = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except StoreError as error:
                future.set_result(error)
            except Exception as error:  # noqa: BLE001  raised again where the result is asked for
                future.set_exception(error)
