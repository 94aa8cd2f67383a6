"""Operator graphs and devices: their edges, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from random_operators import devices_of, graph_of, operator_graphs

from weft.errors import InputError
from weft.planning.placement.graph import OperatorGraph, topological_order


def test_edges_add_up_the_tensors_between_two_operators() -> None:
    graph = graph_of([[1]] * 3, [(0, 4, [1, 2]), (0, 3, [2]), (1, 5, [2])])
    assert graph.edges.tolist() == [[0, 1], [0, 2], [1, 2]]
    assert graph.edge_bytes.tolist() == [4, 7, 5]
    assert graph.successors == [[1, 2], [2], []]
    assert graph.predecessors == [[], [0], [0, 1]]
    assert graph.tensors_read == [[], [0], [0, 1, 2]]


@given(graph=operator_graphs(devices=1))
def test_operators_are_in_order_when_each_is_behind_what_it_reads(graph: OperatorGraph) -> None:
    backwards = -np.arange(graph.operators)
    order = topological_order(graph.operators, graph.edges, backwards)
    position = np.argsort(order)
    assert sorted(order.tolist()) == list(range(graph.operators))
    assert (position[graph.edges[:, 0]] < position[graph.edges[:, 1]]).all()


def test_the_next_operator_is_the_one_with_the_least_key() -> None:
    edges = np.array([[0, 2], [1, 2]])
    assert topological_order(4, edges, np.array([5, 4, 0, 3])).tolist() == [3, 1, 0, 2]


def test_operators_without_time_are_named() -> None:
    with pytest.raises(InputError, match="'operator 1' takes no time; at least 1 tick"):
        graph_of([[1, 1], [1, 0]], [])


def test_no_devices_are_refused() -> None:
    with pytest.raises(InputError, match="0 devices; at least 1"):
        devices_of(0)


@pytest.mark.parametrize("tensor", [(1, 1, [1]), (1, 1, [0]), (0, 1, [2])])
def test_an_operator_reads_from_operators_before_it(tensor: tuple[int, int, list[int]]) -> None:
    with pytest.raises(InputError, match="must be by an operator behind the producer"):
        graph_of([[1], [1]], [tensor])


def test_columns_of_other_lengths_are_refused() -> None:
    with pytest.raises(InputError, match="columns of other lengths than 2 operators"):
        graph_of([[1], [1]], [], permanent=(1, 2, 3))
