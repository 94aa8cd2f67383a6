"""Series-parallel decomposition of a graph of layers, and the conversion of graphs that are none.

A graph is series-parallel if series and parallel composition of single layers give its order.

Other graphs are converted as GraphPipe does (arXiv 2406.17145, section 5): false dependencies make them
series-parallel. Here they stay within the smallest factor that needs them. They constrain planning only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import rustworkx

from weft.planning.planners.graphpipe.reduction import Reduction
from weft.planning.planners.graphpipe.trees import Edge, Tree, joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Decomposition:
    """The tree of a graph, and the layers of each factor that was converted."""

    tree: Tree
    converted: tuple[tuple[int, ...], ...] = ()


def decompose(layers: Collection[int], edges: Iterable[Edge], seconds: Mapping[int, float]) -> Decomposition:
    """Return the series-parallel tree of a graph; other graphs are converted.

    Args:
        layers: the layers, at least one.
        edges: pairs (producer, consumer) of these layers, from layers to later ones.
        seconds: by layer, the weight of critical paths, which conversions keep short.
    """
    converted: list[tuple[int, ...]] = []
    tree = _decompose(sorted(layers), list(edges), seconds, converted)
    return Decomposition(tree=tree, converted=tuple(converted))


def _decompose(
    layers: Sequence[int],
    edges: Iterable[Edge],
    seconds: Mapping[int, float],
    converted: list[tuple[int, ...]],
) -> Tree:
    network = Reduction(layers, _reduced(layers, edges))
    while (tree := network.tree) is None:
        factor = network.smallest_factor()
        converted.append(factor.layers)
        halves = [
            _decompose(half, _within(half, network.edges), seconds, converted)
            for half in _halves(factor.layers, _within(factor.layers, network.edges), seconds)
        ]
        network.replace(factor, joined("series", halves))
    return tree


def _within(layers: Collection[int], edges: Iterable[Edge]) -> list[Edge]:
    held = set(layers)
    return [(one, other) for one, other in edges if one in held and other in held]


def _reduced(layers: Sequence[int], edges: Iterable[Edge]) -> list[Edge]:
    """Return the edges without those that a longer way makes unnecessary."""
    graph = rustworkx.PyDiGraph(multigraph=False)
    graph.add_nodes_from(list(layers))
    place = {layer: index for index, layer in enumerate(layers)}
    graph.add_edges_from_no_data([(place[one], place[other]) for one, other in edges])
    reduced, index_of = rustworkx.transitive_reduction(graph)
    layer_of = {index_of[index]: layer for index, layer in enumerate(layers)}
    return sorted((layer_of[one], layer_of[other]) for one, other in reduced.edge_list())


def _halves(
    layers: Sequence[int], edges: Sequence[Edge], seconds: Mapping[int, float]
) -> tuple[list[int], list[int]]:
    """Cut a factor in two so that the critical paths of both halves have the least sum.

    The first half has the layers that may end by some time. Among equal cuts, the halves with the most equal
    critical paths win.
    """
    ends = earliest_ends(layers, edges, seconds)
    after = earliest_ends(layers[::-1], [(other, one) for one, other in edges], seconds)
    times = sorted(set(ends.values()))

    def cost(time: float) -> tuple[float, float]:
        rest = max(after[layer] for layer in layers if ends[layer] > time)
        return float(np.float32(time + rest)), abs(time - rest)

    best = min(times[:-1], key=cost)
    return [one for one in layers if ends[one] <= best], [one for one in layers if ends[one] > best]


def earliest_ends(
    layers: Sequence[int], edges: Iterable[Edge], seconds: Mapping[int, float]
) -> dict[int, float]:
    """Return the time at which each layer may end; `layers` come after those that they wait for.

    A layer without work takes a moment, so that it ends after these.
    """
    producers: dict[int, list[int]] = {layer: [] for layer in layers}
    for one, other in edges:
        producers[other].append(one)
    moment = 1e-9 * (sum(seconds[layer] for layer in layers) or 1.0)
    ends: dict[int, float] = {}
    for layer in layers:
        ends[layer] = max((ends[one] for one in producers[layer]), default=0.0) + seconds[layer] + moment
    return ends
