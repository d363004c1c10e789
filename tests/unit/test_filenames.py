"""The rank and the host that a file's name tells."""

from __future__ import annotations

import pytest

from fr_exporter.filenames import WELL_KNOWN_PREFIXES, Matcher, parse_filename

NCCL = "nccl_trace_rank_"


@pytest.mark.parametrize(
    ("name", "prefix", "rank", "host"),
    [
        ("nccl_trace_rank_0", NCCL, 0, None),
        ("comm_lib_trace_rank_131071", "comm_lib_trace_rank_", 131071, None),
        ("nccl_trace_rank_0.json", NCCL, 0, None),
        ("_dump_7", "_dump_", 7, None),
        ("_dump_00007", "_dump_", 7, None),
        ("rank_3", "rank_", 3, None),
        ("12.json", "", 12, None),
        ("run42_5", "run4", 5, "2"),
        ("nccl_trace_rank_node02_5", NCCL, 5, "node02"),
        ("nccl_trace_rank_node07_40", NCCL, 40, "node07"),
        ("nccl_trace_rank_gpu-17-3_12", NCCL, 12, "gpu-17-3"),
        ("nccl_trace_rank_gpu-17-3.example.org_12.json", NCCL, 12, "gpu-17-3.example.org"),
        ("nccl_trace_rank_10.0.0.17_0", NCCL, 0, "10.0.0.17"),
        ("_dump_rank_5", "_dump_", 5, None),
        ("_dump_node3_rank_5", "_dump_", 5, "node3"),
        ("_dump_frank_5", "_dump_", 5, "frank"),
        ("trace12", "trace", 12, None),
    ],
)
def test_rank_is_the_trailing_integer_and_host_what_stands_before_it(
    name: str, prefix: str, rank: int, host: str | None
) -> None:
    """The rank follows the prefix without separator; a host between the two loses the separators around it."""
    assert parse_filename(name, prefix) == (rank, host)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("_dump_3.tmp", "_dump_"),
        ("_dump_3.json.tmp", "_dump_"),
        ("_dump_3\n", "_dump_"),
        ("_dump_٣", "_dump_"),
        ("_dump_", "_dump_"),
        ("truth.json", ""),
        ("fault_injection.log", ""),
        ("nccl_trace_rank_0.pipe", NCCL),
        ("other_3", "_dump_"),
        ("_dump_1758610505902182983", "_dump_"),
        ("_dump_20250923", "_dump_"),
        ("_dump_1048576", "_dump_"),
        ("_dump_20251048575", "_dump_"),
        ("_dump_" + "9" * 5000, "_dump_"),
        ("nccl_trace_rank_node02", NCCL),
    ],
)
def test_other_names_are_no_dumps(name: str, prefix: str) -> None:
    """Temporary files, logs, dates, job IDs beyond any rank, and a host without a rank do not match."""
    assert parse_filename(name, prefix) is None


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("_dump_*", "_dump_12", (12, None)),
        ("_dump_*", "x_dump_12", None),
        ("_dump_*", "_dump_12.log", None),
        ("_dump_1*", "_dump_12", (12, None)),
        ("_dump_1*", "_dump_2", None),
        ("_dump_1", "_dump_1", (1, None)),
        ("_dump_?.json", "_dump_4.json", (4, None)),
        ("_dump_?.json", "_dump_4", None),
        ("[_]dump_*", "_dump_4", (4, None)),
        ("*", "nccl_trace_rank_node02_5", (5, "node02")),
        ("nccl_*", "nccl_trace_rank_5", (5, None)),
        ("job7_*", "job7_node1_5", (5, "node1")),
    ],
)
def test_pattern_decides_and_its_literal_beginning_is_the_prefix(
    pattern: str, name: str, expected: tuple[int, str | None] | None
) -> None:
    """Digits before the wildcard belong to the rank, and a well-known prefix never becomes a host."""
    assert Matcher.from_pattern(pattern).match(name) == expected


def test_prefix_is_taken_literally() -> None:
    """Wildcards in a prefix are plain characters, and the digits at its end are its own."""
    assert Matcher.from_prefix("run[7]*").match("run[7]*3") == (3, None)
    assert Matcher.from_prefix("run[7]*").match("run73") is None
    assert Matcher.from_prefix("run7").match("run73") == (3, None)


def test_well_known_prefixes_end_with_the_most_general() -> None:
    """Whoever tries them in order comes to bare ranks last."""
    assert WELL_KNOWN_PREFIXES == ("_dump_", "nccl_trace_rank_", "comm_lib_trace_rank_", "rank_", "")
