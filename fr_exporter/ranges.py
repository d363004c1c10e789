"""Many ranks in few characters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def format_ranges(ranks: Iterable[int], *, max_length: int | None = None) -> str:
    """Return ranks as sorted ranges: `9,14`, `0-7,12`; the empty string for none.

    With `max_length`, whole ranges are kept while they fit in so many characters, then `…+N` counts the ranks left out.
    """
    spans = ((f"{first}-{last}" if last > first else str(first), last - first + 1) for first, last in _spans(ranks))
    return join_within(spans, max_length)


def name_ranks(ranks: Iterable[int], *, max_length: int | None = None) -> str:
    """Return `rank 9`, or `ranks 0-7, 12`; `max_length` is that of `format_ranges`."""
    listed = set(ranks)
    ranges = format_ranges(listed, max_length=max_length).replace(",", ", ")
    return f"rank {ranges}" if len(listed) == 1 else f"ranks {ranges}"


def join_within(parts: Iterable[tuple[str, int]], max_length: int | None) -> str:
    """Join parts with commas while they fit in `max_length` characters, then add `…+N`.

    Each part comes with how many things it stands for; N counts those of the parts left out.
    """
    kept: list[str] = []
    length, left_out = 0, 0
    for text, count in parts:
        length += len(text) + bool(kept)
        if left_out or (max_length is not None and length > max_length):
            left_out += count
        else:
            kept.append(text)
    return ",".join(kept) + (f"…+{left_out}" if left_out else "")


def _spans(ranks: Iterable[int]) -> Iterator[tuple[int, int]]:
    first = last = None
    for rank in sorted(set(ranks)):
        if first is None or last is None:
            first = last = rank
        elif rank == last + 1:
            last = rank
        else:
            yield first, last
            first = last = rank
    if first is not None and last is not None:
        yield first, last
