"""Which jobs of a store are alive: pure, and sparing with listings, since a store keeps the jobs of years."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

# How many jobs that are not alive are looked at in one poll.
PROBES = 16


class Discovery:
    """Keeps apart the jobs in which something changed within `ttl_ns`, and the dormant, a few of them probed each time.

    A job is named by its folder. New ones are probed first, and the rest in rotation.
    """

    def __init__(self, ttl_ns: int) -> None:
        self._ttl_ns = ttl_ns
        self._live: set[str] = set()
        # The next to probe first; True for those that were probed before.
        self._dormant: dict[str, bool] = {}

    @property
    def live(self) -> tuple[str, ...]:
        """The jobs that are alive, sorted."""
        return tuple(sorted(self._live))

    @property
    def in_haste(self) -> bool:
        """Whether there are jobs that were never probed: one of them may be in the middle of a hang."""
        return not all(self._dormant.values())

    def candidates(self, there: Iterable[str]) -> list[str]:
        """Return the jobs to look at now, of all those that are there."""
        names = set(there)
        self._live &= names
        new = sorted(names - self._live - self._dormant.keys())
        known = {name: probed for name, probed in self._dormant.items() if name in names}
        self._dormant = {**dict.fromkeys(new, False), **known}
        return [*sorted(self._live), *islice(self._dormant, PROBES)]

    def judge(self, name: str, newest_ns: int | None, now_ns: int) -> None:
        """Take in when a job's newest object was written; None where there is none."""
        self._dormant.pop(name, None)
        self._live.discard(name)
        if newest_ns is not None and newest_ns >= now_ns - self._ttl_ns:
            self._live.add(name)
        else:
            self._dormant[name] = True

    def judge_unlisted(self, name: str) -> None:
        """Take in that a job could not be listed: a new one counts as alive, so that somebody says so."""
        if name not in self._live and self._dormant.pop(name):
            self._dormant[name] = True
        else:
            self._live.add(name)
