"""m-TOPO and round robin: one walk, within what devices have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from random_operators import devices_of, graph_of, questions

from weft.errors import InputError
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.planning.placement.topological import round_robin, topological_fill


@given(asked=questions(grouped=True))
def test_devices_fill_up_one_after_the_other(asked: tuple[OperatorGraph, Devices]) -> None:
    graph, devices = asked
    try:
        device = topological_fill(graph, devices)
    except InputError:
        return
    _, first, dense = np.unique(graph.groups, return_index=True, return_inverse=True)
    assert (np.diff(device[np.sort(first)]) >= 0).all()
    assert np.array_equal(device, device[first][dense])
    for number in range(devices.count):
        held = graph.permanent_bytes[device == number].sum()
        assert held <= devices.memory_bytes[number]


def test_each_device_has_its_share_and_the_largest_more() -> None:
    graph = graph_of([[1, 1]] * 6, [], permanent=(2, 2, 2, 2, 2, 2))
    assert topological_fill(graph, devices_of(2, 100)).tolist() == [0, 0, 0, 0, 1, 1]
    assert topological_fill(graph, devices_of(2, [100, 300])).tolist() == [0, 0, 1, 1, 1, 1]
    assert topological_fill(graph, devices_of(2, 6)).tolist() == [0, 0, 0, 1, 1, 1]


def test_bytes_of_large_devices_do_not_overflow() -> None:
    graph = graph_of([[1, 1]] * 4, [], permanent=[40 * 10**9] * 4)
    assert topological_fill(graph, devices_of(2, 100 * 10**9)).tolist() == [0, 0, 1, 1]


def test_a_group_that_is_left_is_named() -> None:
    graph = graph_of([[1, 1]] * 3, [], permanent=(3, 3, 3))
    with pytest.raises(InputError, match="fills all 2 devices before the group of operator 'operator 2'"):
        topological_fill(graph, devices_of(2, 4))


def test_groups_go_round_in_turn() -> None:
    graph = graph_of([[1, 1]] * 5, [], groups=(7, 3, 7, 9, 3))
    assert round_robin(graph, devices_of(2)).tolist() == [0, 1, 0, 0, 1]
