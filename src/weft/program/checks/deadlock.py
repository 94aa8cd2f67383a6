"""Freedom from deadlock when a send waits until its receive has been reached.

Under rendezvous a message is one event of both ranks, and so is a collective: each is contracted to one node.
A node waits for the instructions before it in its queues, for the sources of its edges and, because a
synchronous device posts nothing while it computes, for the computation its host issued before. The program
cannot hang on any device if this graph has no cycle. (Edges to later cycles and the order of cycles only
point forward, so one cycle of the program is enough.)
"""

from __future__ import annotations

from collections import deque

import numpy as np
import rustworkx

from weft.errors import Violation
from weft.program.checks.messages import collective_codes, matched
from weft.program.checks.report import name
from weft.program.kinds import MESSAGES, is_collective, is_compute, is_send
from weft.program.program import Ints, Program

# A cycle of a real deadlock is short; a longer one is shown by its first instructions.
_SHOWN = 12


def check_deadlock(program: Program) -> list[Violation]:
    node = _events(program)
    source, target = _waits(program, node)
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


def _events(program: Program) -> Ints:
    """Node of each row: its own, its send's for a receive, the first member's for a collective."""
    node = np.arange(len(program), dtype=np.int64)
    for send, receive in MESSAGES:
        sends, receives = matched(program, send, receive)
        joined = receives != -1
        node[receives[joined]] = sends[joined]
    rows = np.flatnonzero(is_collective(program.columns.kind))
    if len(rows):
        _, first, call = np.unique(collective_codes(program, rows), return_index=True, return_inverse=True)
        node[rows] = rows[first[call]]
    return node


def _waits(program: Program, node: Ints) -> tuple[Ints, Ints]:
    """Pairs (source, target) of nodes: the target cannot end before the source has."""
    queue = program.queue
    order = np.argsort(queue, kind="stable")
    follows = np.diff(queue[order]) == 0

    edges = program.edges
    same_cycle = edges.distance == 0
    source, target = edges.source[same_cycle], edges.target[same_cycle]
    # The order of a queue already says what an edge inside it says; a message's own edge became one node.
    told = (queue[source] == queue[target]) & (source < target)
    computes = is_compute(program.columns.kind)
    sends = is_send(program.columns.kind)
    told |= sends[source] & (source != target) & (node[target] == source)

    last_compute = np.maximum.accumulate(np.where(computes, np.arange(len(program)), -1))
    posted = np.flatnonzero(~computes & (last_compute >= program.rank_starts[program.columns.rank]))

    sources = np.concatenate([order[:-1][follows], source[~told], last_compute[posted]])
    targets = np.concatenate([order[1:][follows], target[~told], posted])
    pair = np.unique(node[sources] * len(program) + node[targets])
    return pair // len(program), pair % len(program)


def _short_cycle(graph: rustworkx.PyDiGraph) -> list[int]:
    """A shortest cycle through some node of the smallest knot."""
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
