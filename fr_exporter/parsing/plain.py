"""What a dump may hold: plain data, and integers that fit in 64 bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from fr_exporter.errors import RejectedDump

# Counters, times and ids; what does not fit would break whoever reads the result.
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

_CONTAINERS = (dict, list, tuple)
_PLAIN_TYPES = frozenset({dict, list, tuple, str, int, float, bool, type(None)})


def refuse_other_types(values: Iterable[Any]) -> None:
    """Refuse what no recorder writes: bytes, sets and the like, under any key."""
    pending: list[Any] = [list(values)]
    # A pickle can hold a list that holds itself, or one and the same list very often.
    seen: set[int] = set()
    while pending:
        container = pending.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        held = [*container.keys(), *container.values()] if isinstance(container, dict) else container
        for kind in set(map(type, held)) - _PLAIN_TYPES:
            raise RejectedDump(f"refused: the file holds a {kind.__name__}, a dump holds plain data only")
        pending.extend(value for value in held if isinstance(value, _CONTAINERS))
