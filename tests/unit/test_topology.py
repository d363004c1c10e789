"""Which node a rank runs on."""

from __future__ import annotations

import pytest

from fr_exporter.config import Topology
from fr_exporter.errors import ConfigError
from fr_exporter.topology import make_node_of, parse_hosts

HERE = Topology(ranks_per_node=None, hosts_file=None, node="here")
NOWHERE = Topology(ranks_per_node=None, hosts_file=None, node=None)


def test_hosts_take_ranks_in_order() -> None:
    """The first host holds the first ranks: as many as its slots, or as any node, comments and blank lines aside."""
    text = "# two kinds of nodes\nbig slots=3\n\n  small   # the default\nlast slots = 1\n"
    assert parse_hosts(text, 2) == ("big", "big", "big", "small", "small", "last")


@pytest.mark.parametrize(
    ("text", "ranks_per_node", "message"),
    [
        (
            "a slots=2\n\nb\n",
            None,
            "hosts file line 3: how many ranks run on 'b'? write slots=N or set topology.ranks_per_node",
        ),
        ("a\nb 8\n", 8, "hosts file line 2: 'b 8' is neither HOST nor HOST slots=N"),
        ("a slots=0\n", 8, "hosts file line 1: 'a slots=0' is neither HOST nor HOST slots=N"),
        ("# nobody\n", 8, "the hosts file names no host; write one a line"),
    ],
)
def test_a_wrong_hosts_file_is_told_the_line(text: str, ranks_per_node: int | None, message: str) -> None:
    """A hosts file that does not say where each rank runs is refused in one line."""
    with pytest.raises(ConfigError) as refusal:
        parse_hosts(text, ranks_per_node)
    assert str(refusal.value) == message


def test_the_file_name_wins_then_the_hosts_then_the_node() -> None:
    """Rank 0 is a rank like any other; a rank behind the last host is on no known node, not on this one."""
    hosts = ("n0", "n1")
    assert make_node_of(HERE, hosts)(0, "named") == "named"
    assert [make_node_of(HERE, hosts)(rank, None) for rank in (0, 1, 2)] == ["n0", "n1", None]
    assert make_node_of(HERE, None)(0, None) == "here"
    assert make_node_of(NOWHERE, None)(0, None) is None
