"""Text for people, whatever it is made of."""

from __future__ import annotations

import re

_USER = re.compile(r"://[^/\s]*@")
_QUERY = re.compile(r"\?[^\s\"']*")
_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def printable(text: str) -> str:
    """Return text with every character that a terminal does not print written as its escape."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def shown_url(url: str) -> str:
    """Return a URL without what may be secret in it: user and password, and the query."""
    return _QUERY.sub("?***", _USER.sub("://***@", url))


def span(seconds: int) -> str:
    """Return a time span in its largest unit that fits and the next smaller ones, two at most: `1 h 14 min`."""
    parts = []
    for name, length in _UNITS:
        if seconds >= length:
            parts.append(f"{seconds // length} {name}")
            seconds %= length
    return " ".join(parts[:2]) or "0 s"
