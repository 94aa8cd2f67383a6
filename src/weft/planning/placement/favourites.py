"""Favourite children of m-SCT: the transfers that a linear program would rather not pay.

An operator has at most one favourite child and is the favourite of at most one (Hanen and Munier, 1995;
Jeon et al., Baechi, SoCC 2020, section 3.3). x = 0 for an edge means that its transfer is avoided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weft.describe.one_line import one_line
from weft.planning.placement.bounds import longest_chain
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.planning.placement.linear_program import LinearProgram
from weft.program.arrays import Floats, Ints

# Edges with a smaller x are favourites. Below 0.5 they form a matching by themselves.
THRESHOLD = 0.1
# Programs of more operators take too long; edges are then matched by the time of their transfers.
MOST_OPERATORS = 20_000


@dataclass(frozen=True, kw_only=True)
class Favourites:
    """The favourite child of each operator that has one, and how they were found.

    Attributes:
        children: by operator.
        makespan_ticks: the longest chain if only favourites' transfers are avoided.
        optimum_ticks: the linear program's optimum; None if it was not solved.
    """

    children: Mapping[int, int]
    makespan_ticks: float
    optimum_ticks: float | None

    def __repr__(self) -> str:
        return one_line(self, f"{len(self.children)} favourites")


def favourites(
    graph: OperatorGraph,
    devices: Devices,
    *,
    threshold: float = THRESHOLD,
    most_operators: int = MOST_OPERATORS,
    seconds: float = 30.0,
) -> Favourites:
    """Return favourites by the linear program, or by a greedy matching of large graphs.

    The program's solution is not unique where an edge is not critical. Of all optima, the one with the least
    transfers paid is taken, so that solvers and their versions agree.

    Args:
        threshold: edges with x below it are favourites; 0: none.
        seconds: limit of each of two runs of the solver.
    """
    edges, ticks = graph.edges, _mean_ticks(graph)
    transfers = devices.least_transfer_ticks(graph.edge_bytes).astype(np.float64)
    paid, optimum = None, None
    if len(edges) and graph.operators <= most_operators:
        paid, optimum = _solved(graph, ticks, transfers, seconds)
    if paid is None:
        slack = _slack(graph, ticks, transfers)
        near = np.flatnonzero(slack < transfers)
        order = near[np.lexsort([near, slack[near], -transfers[near]])]
    else:
        near = np.flatnonzero(paid < threshold)
        order = near[np.lexsort([near, -transfers[near], paid[near]])]
    chosen = _matched(edges, order)
    avoided = transfers.copy()
    avoided[chosen] = 0.0
    return Favourites(
        children={int(parent): int(child) for parent, child in edges[chosen]},
        makespan_ticks=longest_chain(graph, ticks, avoided),
        optimum_ticks=optimum,
    )


def _mean_ticks(graph: OperatorGraph) -> Floats:
    found: Floats = graph.ticks.mean(axis=1)
    return found


def _solved(
    graph: OperatorGraph, ticks: Floats, transfers: Floats, seconds: float
) -> tuple[Floats | None, float | None]:
    """Return x of each edge in a canonical optimum, and the optimal makespan; None if time ends before.

    Columns are the edges' x, the operators' starts and the makespan.
    """
    edges, operators = graph.edges, graph.operators
    count, last = len(edges), len(edges) + operators
    outgoing = np.bincount(edges[:, 0], minlength=operators).astype(np.float64)
    incoming = np.bincount(edges[:, 1], minlength=operators).astype(np.float64)
    number, sinks = np.arange(count), np.flatnonzero(outgoing == 0)
    scale = max(float(ticks.max()), 1.0)
    program = LinearProgram(most=np.concatenate([np.ones(count), np.full(operators + 1, np.inf)]))
    # start of reader - start of producer - transfer * x >= time of producer
    columns = np.stack([count + edges[:, 1], count + edges[:, 0], number], axis=1)
    values = np.stack([np.ones(count), -np.ones(count), -transfers / scale], axis=1)
    program.require(columns, values, ticks[edges[:, 0]] / scale)
    program.require(
        np.stack([np.full(len(sinks), last), count + sinks], axis=1),
        np.tile([1.0, -1.0], (len(sinks), 1)),
        ticks[sinks] / scale,
    )
    # All children but one are no favourites, and all parents but one have another favourite.
    program.require_sums(edges[:, 0], number, outgoing - 1.0)
    program.require_sums(edges[:, 1], number, incoming - 1.0)
    least = np.zeros(last + 1)
    least[last] = 1.0
    first = program.minimum(least, seconds)
    if first is None:
        return None, None
    optimum = float(first.columns[last])
    program.most[last] = optimum * (1.0 + 1e-9)
    second = program.minimum(np.concatenate([transfers / scale, np.zeros(operators + 1)]), seconds)
    paid = (first if second is None else second).columns[:count]
    # A solver's values may lie a little outside of their bounds.
    return np.clip(np.round(paid, 9), 0.0, 1.0), optimum * scale


def _slack(graph: OperatorGraph, ticks: Floats, transfers: Floats) -> Floats:
    """Return by how much each edge may take longer before the longest chain does, all transfers paid."""
    before, after = [0.0] * graph.operators, [0.0] * graph.operators
    own, pairs, between = ticks.tolist(), graph.edges.tolist(), transfers.tolist()
    for (producer, reader), one in zip(pairs, between, strict=True):
        before[reader] = max(before[reader], before[producer] + own[producer] + one)
    for (producer, reader), one in zip(reversed(pairs), reversed(between), strict=True):
        after[producer] = max(after[producer], after[reader] + own[reader] + one)
    ends = np.array(before) + ticks
    longest = float((ends + np.array(after)).max(initial=0.0))
    producer, reader = graph.edges[:, 0], graph.edges[:, 1]
    found: Floats = longest - (ends[producer] + transfers + ticks[reader] + np.array(after)[reader])
    return found


def _matched(edges: Ints, order: Ints) -> list[int]:
    """Return edges in this order whose ends are ends of no edge before."""
    parents, children = set[int](), set[int]()
    chosen = []
    for number in order.tolist():
        parent, child = edges[number].tolist()
        if parent not in parents and child not in children:
            parents.add(parent)
            children.add(child)
            chosen.append(number)
    return chosen
