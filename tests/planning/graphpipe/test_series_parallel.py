"""The series-parallel decomposition: its trees keep the order of the graph, and N is none."""

from __future__ import annotations

import pytest
import rustworkx
from hypothesis import given
from hypothesis import strategies as st

from weft.planning.planners.graphpipe.series_parallel import decompose, is_series_parallel
from weft.planning.planners.graphpipe.trees import Edge, Parallel, Series, Tree, layers_of, order_of

N = [(0, 2), (0, 3), (1, 3)]


@st.composite
def trees(draw: st.DrawFn, most: int = 10) -> tuple[int, list[Edge]]:
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
def graphs(draw: st.DrawFn, most: int = 9) -> tuple[int, list[Edge]]:
    """Any DAG of layers in their order."""
    count = draw(st.integers(1, most))
    pairs = [(one, other) for other in range(count) for one in range(other)]
    return count, sorted(draw(st.sets(st.sampled_from(pairs)))) if pairs else []


def closure(count: int, edges: list[Edge]) -> frozenset[Edge]:
    graph = rustworkx.PyDiGraph()
    graph.add_nodes_from(range(count))
    graph.add_edges_from_no_data(edges)
    return frozenset((one, other) for one in range(count) for other in rustworkx.descendants(graph, one))


@given(trees())
def test_a_series_parallel_graph_keeps_its_order(graph: tuple[int, list[Edge]]) -> None:
    count, edges = graph
    found = decompose(range(count), edges, dict.fromkeys(range(count), 1.0))
    assert found.converted == ()
    assert order_of(found.tree) == closure(count, edges)


@given(graphs(), st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.0]), min_size=9, max_size=9))
def test_a_conversion_keeps_the_order_and_every_layer(
    graph: tuple[int, list[Edge]], seconds: list[float]
) -> None:
    count, edges = graph
    found = decompose(range(count), edges, dict(enumerate(seconds)))
    assert sorted(layers_of(found.tree)) == list(range(count))
    assert order_of(found.tree) >= closure(count, edges)
    assert bool(found.converted) == (order_of(found.tree) != closure(count, edges))


def parts(tree: Tree) -> list[Tree]:
    return [tree, *(inner for part in getattr(tree, "parts", ()) for inner in parts(part))]


@given(graphs())
def test_no_part_has_parts_of_its_own_kind(graph: tuple[int, list[Edge]]) -> None:
    count, edges = graph
    for tree in parts(decompose(range(count), edges, dict.fromkeys(range(count), 1.0)).tree):
        if not isinstance(tree, int):
            assert len(tree.parts) > 1
            assert not any(isinstance(part, type(tree)) for part in tree.parts)


def test_n_is_rejected_and_converted_in_two_ranks() -> None:
    assert not is_series_parallel(range(4), N)
    found = decompose(range(4), N, dict.fromkeys(range(4), 1.0))
    assert found.tree == Series((Parallel((0, 1)), Parallel((2, 3))))
    assert found.converted == ((0, 1, 2, 3),)


def test_a_conversion_keeps_long_branches_side_by_side() -> None:
    """Layer 0 takes as long as 1 and 4 one after the other; ranks by depth would wait for 0 before 4."""
    edges = [(0, 2), (0, 3), (1, 4), (4, 3)]
    assert not is_series_parallel(range(5), edges)
    found = decompose(range(5), edges, {0: 2.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0})
    assert found.tree == Series((Parallel((0, Series((1, 4)))), Parallel((2, 3))))


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
