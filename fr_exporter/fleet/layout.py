"""The names of objects: `<training job>/<attempt>/<node>`, where job and node are percent-quoted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

# As large as a record can hold.
_LAST_ATTEMPT = 2**31 - 1
# What file systems allow.
_LONGEST_NAME = 255


@dataclass(frozen=True, slots=True)
class Place:
    """Where the records of one node belong. `attempt` counts the job's restarts, from 0."""

    training_job: str
    attempt: int
    node: str


def object_name(place: Place) -> str:
    """Return the name of a place's object below the store's URL.

    Raises ValueError for a name that is empty, not text or too long, and for an attempt that a record cannot hold.
    """
    if not 0 <= place.attempt <= _LAST_ATTEMPT:
        raise ValueError(f"{place.attempt} is not an attempt from 0 to {_LAST_ATTEMPT}")
    job, node = quoted(place.training_job), quoted(place.node)
    for name, part in ((place.training_job, job), (place.node, node)):
        if len(part) > _LONGEST_NAME:
            size = f"{len(part)} bytes when quoted, and a file name has {_LONGEST_NAME} at most"
            raise ValueError(f"the name {name!r} takes {size}; shorten it")
    return f"{job}/{place.attempt}/{node}"


def quoted(name: str) -> str:
    """Return what stands for a job or a node in a path. Raises ValueError for a name that is empty or not text."""
    if not name:
        raise ValueError("an empty name cannot be that of a job or a node")
    try:
        text = quote(name, safe="")
    except UnicodeEncodeError:
        raise ValueError(f"the name {name!r} is not UTF-8 text") from None
    # A file system takes "." and ".." for itself, and what begins with "." is a temporary file.
    return f"%2E{text[1:]}" if text.startswith(".") else text


def parse_name(text: str) -> str | None:
    """Return the job or the node that a listed name stands for; None for a temporary or foreign one."""
    try:
        name = unquote(text, errors="strict")
        return name if quoted(name) == text else None
    except ValueError:
        return None


def parse_attempt(text: str) -> int | None:
    """Return the attempt that a listed name stands for; None for a foreign one."""
    attempt = int(text) if re.fullmatch("0|[1-9][0-9]{0,9}", text) is not None else -1
    return attempt if 0 <= attempt <= _LAST_ATTEMPT else None
