"""Words that every output shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fr_exporter.ranges import format_ranges, name_ranks
from fr_exporter.text import printable, span


def test_printable_keeps_what_can_be_read() -> None:
    """Letters of any script stay; a control character becomes the escape that names it."""
    assert printable("データ group é") == "データ group é"
    assert printable("a\tb\x1b\u202e") == "a\\tb\\x1b\\u202e"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59, "59 s"),
        (604, "10 min 4 s"),
        (3600, "1 h"),
        (4478, "1 h 14 min"),
        (86_400 * 3 + 3601, "3 d 1 h"),
    ],
)
def test_a_span_is_read_at_a_glance(seconds: int, text: str) -> None:
    """Two units at most: seconds do not matter after an hour."""
    assert span(seconds) == text


def test_ranks_are_named_as_people_do() -> None:
    """One rank is singular, however often it is given; more are ranges, cut with a count where they grow too long."""
    assert name_ranks([9, 9]) == "rank 9"
    assert name_ranks([12, 0, 1, 2]) == "ranks 0-2, 12"
    assert name_ranks(range(0, 64, 2), max_length=5) == "ranks 0, 2, 4…+29"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], ""), ([0], "0"), ([14, 9], "9,14"), ([12, *range(8)], "0-7,12"), ([3, 2, 2], "2-3"), ([0, 2, 4], "0,2,4")],
)
def test_ranges(ranks: list[int], text: str) -> None:
    """Ranks are sorted, counted once, and neighbours joined."""
    assert format_ranges(ranks) == text


@given(st.sets(st.integers(0, 300)), st.integers(0, 40))
def test_ranges_lose_nothing(ranks: set[int], max_length: int) -> None:
    """What the ranges hold and what they say is left out make up all the ranks, in at most so many characters."""
    kept, _, left_out = format_ranges(ranks, max_length=max_length).partition("…+")
    shown: set[int] = set()
    for part in filter(None, kept.split(",")):
        first, _, last = part.partition("-")
        shown |= set(range(int(first), int(last or first) + 1))
    assert len(kept) <= max_length
    assert shown <= ranks
    assert len(shown) + int(left_out or 0) == len(ranks)
    assert format_ranges(shown) == kept
