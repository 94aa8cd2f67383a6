"""Rules of people: what each does with a graph that it is made for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_operators import devices_of, graph_of, operator_graphs

from weft.errors import InputError
from weft.planning.placement.expert import RULES, expert
from weft.planning.placement.graph import OperatorGraph
from weft.planning.placement.list_scheduler import earliest_task_first


@given(graph=operator_graphs(devices=3), latency=st.sampled_from([0.0, 1.0, 20.0]))
def test_the_best_rule_counts(graph: OperatorGraph, latency: float) -> None:
    devices = devices_of(3, latency=latency)
    by_rules = {
        name: earliest_task_first(graph, devices, pinned=rule(graph, devices)) for name, rule in RULES.items()
    }
    assert expert(graph, devices).makespan == min(one.makespan for one in by_rules.values())
    assert by_rules["one device"].makespan == graph.ticks.sum(axis=0).min()


def chain(count: int, **columns: list[int]) -> OperatorGraph:
    return graph_of([[2, 1]] * count, [(one, 1, [one + 1]) for one in range(count - 1)], **columns)  # type: ignore[arg-type]


def test_equal_times_go_by_speed() -> None:
    assert RULES["equal times"](chain(6), devices_of(2)) == [0, 0, 1, 1, 1, 1]


def test_devices_are_filled_with_what_arrives() -> None:
    # Three operators fill device 0; device 1 has room for one tensor and two operators.
    devices = devices_of(2, [9, 7])
    assert RULES["filled"](chain(5, permanent=[3] * 5), devices) == [0, 0, 0, 1, 1]
    with pytest.raises(InputError, match="must be on device 1, which lacks 1 B"):
        earliest_task_first(
            chain(5, permanent=[3] * 5),
            devices_of(2, [9, 6]),
            pinned=RULES["filled"](chain(5, permanent=[3] * 5), devices_of(2, [9, 6])),
        )


def test_towers_and_branches_lie_apart() -> None:
    towers = graph_of([[3, 3]] * 5, [(0, 1, [2]), (1, 1, [3]), (2, 1, [4]), (3, 1, [4])])
    device = RULES["towers"](towers, devices_of(2))
    assert device[0] == device[2] != device[1] == device[3]
    # 0 begins two branches of two operators, which 5 joins.
    branches = graph_of([[3, 3, 3]] * 6, [(0, 1, [1, 2]), (1, 1, [3]), (2, 1, [4]), (3, 1, [5]), (4, 1, [5])])
    device = RULES["branches"](branches, devices_of(3))
    assert device[1] == device[3] != device[2] == device[4]
    assert device[0] == device[5]
    assert len(set(RULES["towers"](branches, devices_of(3)))) == 1


def test_a_device_of_all_is_the_fastest_with_room() -> None:
    graph = graph_of([[1, 2, 3]] * 2, [], permanent=(4, 4))
    assert RULES["one device"](graph, devices_of(3)) == [0, 0]
    assert RULES["one device"](graph, devices_of(3, [4, 8, 8])) == [1, 1]


def test_rules_without_room_are_refused() -> None:
    graph = graph_of([[1, 1]], [], permanent=(9,))
    with pytest.raises(InputError, match="lacks"):
        expert(graph, devices_of(2, 8))
    assert np.array_equal(expert(graph, devices_of(2, 9)).device, [0])
