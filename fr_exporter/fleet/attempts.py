"""Which attempt of a job counts: pure, and sparing with requests, since a job may have been started many times."""

from __future__ import annotations

from collections.abc import Sequence

# Whoever was started anew dumps later than the attempt before it was last written to, and not only just.
_LATER_NS = 120 * 10**9


class Attempts:
    """The attempts of one job. The largest counts, unless an earlier one is written to later, and dumped later.

    That is so where a job was submitted anew under its name, so that it is counted from the beginning again. What a
    node sends late, when its store or its network is back, was dumped earlier, and brings no former attempt back.
    """

    def __init__(self) -> None:
        # By attempt, when it was last written to; None where it is empty. The next to look at comes first.
        self._written_ns: dict[int, int | None] = {}
        # When the dumps in an attempt's newest object were made, and the token of that object.
        self._dumped: dict[int, tuple[tuple[str, ...], int]] = {}

    @property
    def challenger(self) -> int | None:
        """The attempt that is written to later than the largest, None where there is none: its dumps decide."""
        latest = max(self._written_ns, key=lambda attempt: self._written_ns[attempt] or 0, default=None)
        is_later = latest is not None and (self._written_ns[latest] or 0) > self._largest_written_ns()
        return latest if is_later else None

    @property
    def present(self) -> int | None:
        """The attempt that counts, of those that were looked at; None where there is none."""
        challenger = self.challenger
        if challenger is not None and challenger in self._dumped:
            _, dumped_ns = self._dumped[challenger]
            if dumped_ns > self._largest_written_ns():
                return challenger
        return max(self._written_ns, default=None)

    def candidates(self, there: Sequence[int]) -> list[int]:
        """Return which to look at now, of all that are there: the largest, the present, and one other in turn."""
        known = {attempt: written_ns for attempt, written_ns in self._written_ns.items() if attempt in there}
        new = sorted(set(there) - known.keys())
        self._written_ns = known
        self._dumped = {attempt: dumped for attempt, dumped in self._dumped.items() if attempt in there}
        always = {attempt for attempt in (max(there, default=None), self.present) if attempt is not None}
        others = [attempt for attempt in (*new, *known) if attempt not in always]
        return [*sorted(always), *others[:1]]

    def judge(self, attempt: int, written_ns: int | None) -> None:
        """Take in when an attempt was last written to."""
        self._written_ns.pop(attempt, None)
        self._written_ns[attempt] = written_ns

    def knows(self, attempt: int, token: tuple[str, ...]) -> bool:
        """Tell whether the dumps of this version of an attempt's newest object were taken in."""
        return attempt in self._dumped and self._dumped[attempt][0] == token

    def judge_dumps(self, attempt: int, token: tuple[str, ...], dumped_ns: int) -> None:
        """Take in when the dumps in an attempt's newest object were made."""
        self._dumped[attempt] = token, dumped_ns

    def _largest_written_ns(self) -> int:
        largest = max(self._written_ns, default=None)
        written_ns = None if largest is None else self._written_ns[largest]
        return 0 if written_ns is None else written_ns + _LATER_NS
