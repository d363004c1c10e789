"""Which attempt of a job counts: pure, and sparing with listings, since a job may have been started many times."""

from __future__ import annotations

from collections.abc import Sequence

# What a node sends late, when its store or its network is back, must not bring a former attempt back.
_LATER_NS = 120 * 10**9


class Attempts:
    """The attempts of one job. The largest counts, unless an earlier one is written to clearly later.

    That is so where a job was submitted anew under its name, so that it is counted from the beginning again.
    """

    def __init__(self) -> None:
        # By attempt, when it was last written to; None where it is empty. The next to look at comes first.
        self._written_ns: dict[int, int | None] = {}

    @property
    def present(self) -> int | None:
        """The attempt that counts, of those that were looked at; None where there is none."""
        largest = max(self._written_ns, default=None)
        if largest is None:
            return None
        latest = max(self._written_ns, key=lambda attempt: self._written_ns[attempt] or 0)
        is_later = (self._written_ns[latest] or 0) > (self._written_ns[largest] or 0) + _LATER_NS
        return latest if is_later else largest

    def candidates(self, there: Sequence[int]) -> list[int]:
        """Return which to look at now, of all that are there: the largest, the present, and one other in turn."""
        known = {attempt: written_ns for attempt, written_ns in self._written_ns.items() if attempt in there}
        new = sorted(set(there) - known.keys())
        self._written_ns = known
        always = {attempt for attempt in (max(there, default=None), self.present) if attempt is not None}
        others = [attempt for attempt in (*new, *known) if attempt not in always]
        return [*sorted(always), *others[:1]]

    def judge(self, attempt: int, written_ns: int | None) -> None:
        """Take in when an attempt was last written to."""
        self._written_ns.pop(attempt, None)
        self._written_ns[attempt] = written_ns
