"""Random files of a small job, and random histories of them."""

from __future__ import annotations

from hypothesis import strategies as st

from fr_exporter.dumpset import Outcome
from fr_exporter.model import DumpFile
from tests.unit.dumpset_values import dump, file, group, unreadable

Found = tuple[DumpFile, Outcome]

RANKS = st.integers(0, 5)
# Around the window, the grace, and the second by which a rank may write before the one that opens a set.
PAUSES = st.sampled_from([0.0, 0.5, 1.0, 5.0, 59.0, 60.0, 119.0, 121.0, 3600.0])
TIMES = st.none() | st.sampled_from([1.0, 2.0, 500.0, 800.0, 4000.0])
MEMBERS = st.sampled_from([(0, 1), (0, 1, 2, 3), (2, 3), (0, 1, 2, 3, 4, 5), (4, 5)])


@st.composite
def found_files(draw: st.DrawFn) -> Found:
    """Draw one file: a dump of any calls and groups, or one that cannot be read."""
    rank = draw(RANKS)
    path = f"/dumps/{draw(st.sampled_from(['', 'host_']))}{rank}"
    of = file(rank, path=path, mtime_s=draw(st.sampled_from([0, 1, 60, 125, 300, 90000])))
    if draw(st.integers(0, 4)) == 0:
        return of, unreadable(rank, path)
    groups = [group(name, draw(MEMBERS)) for name in draw(st.sets(st.sampled_from("01"), min_size=1))]
    return of, dump(
        rank,
        issued_s=draw(st.lists(TIMES, max_size=3)),
        first_record=draw(st.integers(0, 3)),
        groups=groups,
        enqueued=draw(st.none() | st.integers(1, 3)),
        timeout_ms=draw(st.sampled_from([1000, 600_000])),
        frames=draw(st.booleans()),
    )


# Files as one look at a directory shows them: each path once.
DIRECTORIES = st.lists(found_files(), max_size=7, unique_by=lambda found: found[0].path)

# What a daemon sees: after each pause some files have changed and some are gone.
HISTORIES = st.lists(
    st.tuples(PAUSES, DIRECTORIES, st.sets(st.builds("/dumps/{}".format, RANKS), max_size=2)), max_size=4
)
