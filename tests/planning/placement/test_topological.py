"""m-TOPO and round robin: one walk, within what devices have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from random_operators import devices_of, graph_of, operator_graphs, paper_example, questions

from weft.errors import InputError
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.planning.placement.list_scheduler import earliest_task_first
from weft.planning.placement.placers import PLACERS
from weft.planning.placement.topological import depth_first_order, round_robin, topological_fill


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


# Two chains, numbered in turn.
CHAINS = graph_of(
    [[1, 1]] * 6, [(0, 9, [2]), (1, 9, [3]), (2, 9, [4]), (3, 9, [5])], permanent=(2, 2, 2, 2, 2, 2)
)


@given(graph=operator_graphs(devices=1))
def test_a_depth_first_walk_has_each_operator_once_and_behind_what_it_reads(graph: OperatorGraph) -> None:
    walk = depth_first_order(graph)
    assert sorted(walk.tolist()) == list(range(graph.operators))
    place = np.argsort(walk)
    assert (place[graph.edges[:, 0]] < place[graph.edges[:, 1]]).all()


def test_a_depth_first_walk_goes_along_a_branch_to_its_end() -> None:
    assert depth_first_order(CHAINS).tolist() == [0, 2, 4, 1, 3, 5]
    assert depth_first_order(paper_example()).tolist() == [0, 1, 2, 3, 4, 5]


def test_m_topo_keeps_branches_together_where_that_is_faster() -> None:
    devices = devices_of(2, 6, per_byte=1.0)
    assert topological_fill(CHAINS, devices).tolist() == [0, 0, 0, 1, 1, 1]
    placement = PLACERS["m-topo"](CHAINS, devices)
    assert placement.device.tolist() == [0, 1, 0, 1, 0, 1]
    assert placement.makespan == 3


@given(asked=questions(grouped=True))
def test_m_topo_places_as_well_as_its_published_walk(asked: tuple[OperatorGraph, Devices]) -> None:
    graph, devices = asked
    try:
        published = earliest_task_first(graph, devices, pinned=topological_fill(graph, devices).tolist())
    except InputError:
        return
    assert PLACERS["m-topo"](graph, devices).makespan <= published.makespan


@pytest.mark.parametrize(
    ("memory_bytes", "device", "makespan"), [(100, [0, 0, 0, 0, 1, 1], 13), (5, [0, 0, 0, 1, 1, 1], 9)]
)
def test_the_published_walk_through_the_example_of_the_paper(
    memory_bytes: int, device: list[int], makespan: int
) -> None:
    graph, devices = paper_example(), devices_of(2, memory_bytes)
    filled = topological_fill(graph, devices).tolist()
    assert filled == device
    assert earliest_task_first(graph, devices, pinned=filled).makespan == makespan


def test_groups_go_round_in_turn() -> None:
    graph = graph_of([[1, 1]] * 5, [], groups=(7, 3, 7, 9, 3))
    assert round_robin(graph, devices_of(2)).tolist() == [0, 1, 0, 0, 1]
