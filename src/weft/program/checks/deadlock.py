"""The law of deadlocks: the program cannot hang when a send waits until its receive has been reached.

This holds on any device if the graph of its waits (`weft.program.waits`) has no cycle. Edges to later cycles
of the program, and the order of its cycles, only point forward. So one cycle of the program is enough.
"""

from __future__ import annotations

from collections import deque

import rustworkx

from weft.errors import Violation
from weft.program.checks.report import name
from weft.program.program import Program
from weft.program.waits import events, waits

# A cycle of a real deadlock is short; a longer one is shown by its first instructions.
_SHOWN = 12


def check_deadlock(program: Program) -> list[Violation]:
    """Check that the wait graph has no cycle; the violation shows a short one."""
    source, target = waits(program, events(program))
    graph = rustworkx.PyDiGraph()
    graph.add_nodes_from(range(len(program)))
    graph.extend_from_edge_list(list(zip(source.tolist(), target.tolist(), strict=True)))
    if rustworkx.is_directed_acyclic_graph(graph):
        return []
    cycle = _short_cycle(graph)
    names = [name(program, row) for row in [*cycle[:_SHOWN], *cycle[:1]]]
    if len(cycle) > _SHOWN:
        names.insert(-1, f"({len(cycle) - _SHOWN} more)")
    return [Violation("deadlock", "these wait for each other: " + " -> ".join(names))]


def _short_cycle(graph: rustworkx.PyDiGraph) -> list[int]:
    """Return a shortest cycle through some node of the smallest strongly connected component."""
    loops = [source for source, target in graph.edge_list() if source == target]
    if loops:
        return loops[:1]
    knots = [component for component in rustworkx.strongly_connected_components(graph) if len(component) > 1]
    knot = min(knots, key=lambda component: (len(component), min(component)))
    start, inside = min(knot), set(knot)
    parent: dict[int, int] = {}
    waiting = deque([start])
    while start not in parent:
        node = waiting.popleft()
        for successor in sorted(graph.successor_indices(node)):
            if successor in inside and successor not in parent:
                parent[successor] = node
                waiting.append(successor)
    cycle = [parent[start]]
    while cycle[-1] != start:
        cycle.append(parent[cycle[-1]])
    return cycle[::-1]
