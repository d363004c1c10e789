"""Strongly connected components: our Tarjan beside rustworkx, on wait-for graphs of growing size.

python benchmarks/components.py      (needs rustworkx, which fr_exporter does not)
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import rustworkx

from fr_exporter.analysis.components import components
from fr_exporter.analysis.waitgraph import CallId, Node

ROUNDS = 5


def wait_graph(ranks: int) -> dict[Node, list[Node]]:
    """Return a graph of the shape that `build` gives: half of the ranks wait in one call, pairs wait in cycles."""
    world = CallId("world", "collective", 1)
    edges: dict[Node, list[Node]] = {rank: [] for rank in range(ranks)}
    edges[world] = list(range(ranks // 2))
    for rank in range(ranks // 2, ranks):
        edges[rank].append(world)
    for rank in range(0, ranks // 2, 2):
        pair = CallId(f"pair {rank}", "collective", 1)
        edges[rank].append(pair)
        edges[pair] = [rank + 1]
        edges[rank + 1].append(rank)
    return edges


def in_rustworkx(edges: dict[Node, list[Node]]) -> int:
    """Build the graph there and count its components."""
    graph = rustworkx.PyDiGraph()
    indices = dict(zip(edges, graph.add_nodes_from(list(edges)), strict=True))
    graph.extend_from_edge_list([(indices[node], indices[other]) for node, others in edges.items() for other in others])
    return len(rustworkx.strongly_connected_components(graph))


def best(run: Callable[[], object]) -> float:
    """Return the shortest of some runs, in milliseconds."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


def import_ms(module: str) -> float:
    """Return the milliseconds that importing a module costs a fresh interpreter."""
    script = f"import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
    return 1000 * float(subprocess.check_output([sys.executable, "-c", script]))


def compare(ranks: int) -> None:
    """Print both times for one size."""
    graph = wait_graph(ranks)
    if len(components(graph)) != in_rustworkx(graph):
        sys.exit("the two disagree")
    ours, theirs = best(partial(components, graph)), best(partial(in_rustworkx, graph))
    print(f"{ranks} ranks: ours {ours:.1f} ms, rustworkx {theirs:.1f} ms")


if __name__ == "__main__":
    for count in (1_024, 4_096, 16_384):
        compare(count)
    print(f"import rustworkx: {import_ms('rustworkx'):.0f} ms")
