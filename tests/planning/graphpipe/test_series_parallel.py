"""The series-parallel decomposition: its trees keep the order of the graph, and N is none."""

from __future__ import annotations

import pytest
import rustworkx
from graphpipe_graphs import Graph, graphs, trees
from hypothesis import given
from hypothesis import strategies as st

from weft.planning.planners.graphpipe.series_parallel import decompose
from weft.planning.planners.graphpipe.trees import Edge, Parallel, Series, Tree, layers_of

N = [(0, 2), (0, 3), (1, 3)]


def order_of(tree: Tree) -> frozenset[Edge]:
    """Return all pairs (earlier, later) of layers in the order of a tree."""
    if isinstance(tree, int):
        return frozenset()
    pairs = {pair for part in tree.parts for pair in order_of(part)}
    if isinstance(tree, Series):
        before: list[int] = []
        for part in tree.parts:
            pairs |= {(one, other) for one in before for other in layers_of(part)}
            before += layers_of(part)
    return frozenset(pairs)


def closure(count: int, edges: list[Edge]) -> frozenset[Edge]:
    graph = rustworkx.PyDiGraph()
    graph.add_nodes_from(range(count))
    graph.add_edges_from_no_data(edges)
    return frozenset((one, other) for one in range(count) for other in rustworkx.descendants(graph, one))


@given(trees())
def test_a_series_parallel_graph_keeps_its_order(graph: Graph) -> None:
    count, edges = graph
    found = decompose(range(count), edges, dict.fromkeys(range(count), 1.0))
    assert found.converted == ()
    assert order_of(found.tree) == closure(count, edges)


@given(graphs(), st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.0]), min_size=9, max_size=9))
def test_a_conversion_keeps_the_order_and_every_layer(graph: Graph, seconds: list[float]) -> None:
    count, edges = graph
    found = decompose(range(count), edges, dict(enumerate(seconds)))
    assert sorted(layers_of(found.tree)) == list(range(count))
    assert order_of(found.tree) >= closure(count, edges)
    assert bool(found.converted) == (order_of(found.tree) != closure(count, edges))


def parts(tree: Tree) -> list[Tree]:
    return [tree, *(inner for part in getattr(tree, "parts", ()) for inner in parts(part))]


@given(graphs())
def test_no_part_has_parts_of_its_own_kind(graph: Graph) -> None:
    count, edges = graph
    for tree in parts(decompose(range(count), edges, dict.fromkeys(range(count), 1.0)).tree):
        if not isinstance(tree, int):
            assert len(tree.parts) > 1
            assert not any(isinstance(part, type(tree)) for part in tree.parts)


def test_n_is_rejected_and_converted_in_two_ranks() -> None:
    found = decompose(range(4), N, dict.fromkeys(range(4), 1.0))
    assert found.tree == Series((Parallel((0, 1)), Parallel((2, 3))))
    assert found.converted == ((0, 1, 2, 3),)


def test_a_conversion_keeps_long_branches_side_by_side() -> None:
    """Layer 0 takes as long as 1 and 2 one after the other; ranks by depth would wait for 0 before 2."""
    edges = [(0, 3), (0, 4), (1, 2), (2, 4)]
    found = decompose(range(5), edges, {0: 2.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0})
    assert found.converted
    assert found.tree == Series((Parallel((0, Series((1, 2)))), Parallel((3, 4))))


def test_only_the_smallest_factor_is_converted() -> None:
    """Beside N, two layers in a row stay free of it, and so do those before and behind."""
    edges = [(0, 1), (0, 2), (1, 3), (1, 4), (2, 4), (0, 5), (5, 6), (3, 7), (4, 7), (6, 7)]
    found = decompose(range(8), edges, dict.fromkeys(range(8), 1.0))
    assert found.converted == ((1, 2, 3, 4),)
    inner = Series((Parallel((1, 2)), Parallel((3, 4))))
    assert found.tree == Series((0, Parallel((inner, Series((5, 6)))), 7))


@pytest.mark.parametrize("count", [1, 2_000])
def test_long_chains_have_one_level(count: int) -> None:
    found = decompose(
        range(count), [(one, one + 1) for one in range(count - 1)], dict.fromkeys(range(count), 1.0)
    )
    assert found.tree == (0 if count == 1 else Series(tuple(range(count))))
