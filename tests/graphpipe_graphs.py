"""Graphs of layers with plain costs, and every partition of small ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import rustworkx
from hypothesis import strategies as st

from weft.describe.cluster import Link
from weft.planning.planners.graph_costs import Edge, GraphCosts, PassCosts
from weft.planning.planners.graphpipe.part_plans import StageGraph
from weft.planning.planners.graphpipe.partitioner import Partitioner
from weft.planning.planners.graphpipe.series_parallel import decompose, earliest_ends
from weft.planning.planners.graphpipe.trees import joined

SIZES = (1, 2, 4)
Graph = tuple[int, list[Edge]]


@st.composite
def trees(draw: st.DrawFn, most: int = 10) -> Graph:
    """The layers and the edges of a random series-parallel graph, with skips beside them."""
    count = draw(st.integers(1, most))

    def edges_of(first: int, last: int) -> tuple[list[Edge], list[int], list[int]]:
        """Return edges, first layers and last layers."""
        if last - first == 1:
            return [], [first], [first]
        cut = draw(st.integers(first + 1, last - 1))
        one, other = edges_of(first, cut), edges_of(cut, last)
        if draw(st.booleans()):
            return one[0] + other[0], one[1] + other[1], one[2] + other[2]
        joins = [(end, begin) for end in one[2] for begin in other[1]]
        skips = draw(st.lists(st.sampled_from(sorted(set(range(first, cut)))), max_size=2))
        joins += [(skip, draw(st.integers(cut, last - 1))) for skip in skips]
        return one[0] + other[0] + joins, one[1], other[2]

    return count, sorted(set(edges_of(0, count)[0]))


@st.composite
def graphs(draw: st.DrawFn, most: int = 9) -> Graph:
    """Any DAG of layers in their order."""
    count = draw(st.integers(1, most))
    pairs = [(one, other) for other in range(count) for one in range(other)]
    return count, sorted(draw(st.sets(st.sampled_from(pairs)))) if pairs else []


def plain_costs(
    edges: Sequence[Edge],
    seconds: Sequence[float],
    *,
    devices: int = 4,
    kept_bytes: float = 1.0,
    memory_bytes: float = float("inf"),
    sent_bytes: float = 0.0,
    batch: int = 64,
) -> GraphCosts:
    """Layers with a forward pass of `seconds` per sample and a backward pass of twice that."""
    forward, ones = np.array(seconds, dtype=np.float64), np.ones(len(seconds))
    return GraphCosts(
        edges=tuple(edges),
        passes={
            (size, "none"): PassCosts(
                forward_s=size * forward,
                backward_s=2 * size * forward,
                kept_bytes=size * kept_bytes * ones,
                taken_bytes=0 * ones,
                sent_bytes=size * sent_bytes * ones,
            )
            for size in SIZES
        },
        state_bytes=0 * ones,
        buffer_bytes=0 * ones,
        reduced_bytes=0 * ones,
        memory_bytes=memory_bytes,
        devices=devices,
        global_batch=batch,
        link=Link(1.0, 0.0) if sent_bytes else Link(float("inf"), 0.0),
    )


def partitioner(
    costs: GraphCosts,
    *others: GraphCosts,
    chain: bool = False,
    by_end: bool = False,
    size: int = 4,
) -> Partitioner:
    """The search of the graph, or of its layers as a chain, in their order or by their ends.

    `others` are the costs on other kinds of devices.
    """
    layers, passes = range(costs.layers), costs.passes[size, "none"]
    seconds = dict(enumerate((passes.forward_s + passes.backward_s).tolist()))
    tree = decompose(layers, costs.edges, seconds).tree
    if chain:
        ends = earliest_ends(layers, costs.edges, seconds)
        order = sorted(layers, key=ends.__getitem__) if by_end else layers
        tree = joined("series", [*order])
    return Partitioner(costs=costs, others=others, tree=tree, size=size, degrees=(1,))


def found_by(search: Partitioner, tolerance: float = 1e-9) -> StageGraph:
    found = search.search(tolerance=tolerance)
    assert found is not None
    return found


def towers(lengths: Sequence[int], seconds: Sequence[float]) -> tuple[list[Edge], list[float]]:
    """A stem, towers of layers with the given seconds each, and a head, without work at both ends."""
    edges: list[Edge] = []
    count, ends = 1, []
    for length in lengths:
        before = 0
        for _ in range(length):
            edges.append((before, count))
            before, count = count, count + 1
        ends.append(before)
    works = [second for length, second in zip(lengths, seconds, strict=True) for _ in range(length)]
    return [*edges, *((end, count) for end in ends)], [0.0, *works, 0.0]


def is_acyclic(edges: Sequence[Edge], parts: Sequence[Sequence[int]]) -> bool:
    """Whether parts can run one after the other as wholes: they are convex, and none waits for itself."""
    part_of = {layer: index for index, part in enumerate(parts) for layer in part}
    graph = rustworkx.PyDiGraph(multigraph=False)
    graph.add_nodes_from(range(len(parts)))
    pairs = [(part_of[one], part_of[other]) for one, other in edges]
    graph.add_edges_from_no_data([pair for pair in pairs if pair[0] != pair[1]])
    return rustworkx.is_directed_acyclic_graph(graph)


def partitions(layers: Sequence[int], most: int) -> Iterator[list[list[int]]]:
    """Every partition into at most so many parts."""
    if not layers:
        yield []
        return
    for parts in partitions(layers[1:], most):
        for index in range(len(parts)):
            yield [*parts[:index], [layers[0], *parts[index]], *parts[index + 1 :]]
        if len(parts) < most:
            yield [[layers[0]], *parts]


def best_of_all(costs: GraphCosts, size: int = 4) -> float:
    """The least seconds per sample of every partition that can run."""
    return min(
        max(costs.sample_s(costs.stage(part, size, 1), size, 1) for part in parts)
        for parts in partitions(range(costs.layers), costs.devices)
        if is_acyclic(costs.edges, parts)
    )
