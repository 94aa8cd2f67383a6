"""Bounds of makespans, and when operators have room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_operators import (
    COMMUNICATIONS,
    critical_path_ticks,
    devices_of,
    graph_of,
    operator_graphs,
    paper_example,
)

from weft.planning.placement.bounds import (
    communication_ratios,
    earliest_task_first_bound_ticks,
    lower_bound_ticks,
)
from weft.planning.placement.list_scheduler import earliest_task_first


@given(st.data())
def test_within_its_assumptions_the_earliest_task_first_has_room_and_keeps_its_bound(
    data: st.DataObject,
) -> None:
    count = data.draw(st.integers(1, 4))
    graph = data.draw(operator_graphs(devices=count, most=20, alike=True))
    latency, per_byte = data.draw(st.sampled_from([(0.0, 0.0), (1.0, 0.5), (3.0, 2.0)]))
    devices = devices_of(count, data.draw(st.integers(10, 120)), latency=latency, per_byte=per_byte)
    bound = earliest_task_first_bound_ticks(graph, devices)
    if bound is not None:
        assert earliest_task_first(graph, devices).makespan <= bound * (1 + 1e-12)


@given(st.data())
def test_room_for_the_share_and_the_largest_is_enough(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    graph = data.draw(operator_graphs(devices=count, most=20, alike=True))
    arriving = [sum(graph.tensor_bytes[one] for one in tensors) for tensors in graph.tensors_read]
    copies = sum(
        int(size) * min(len(readers), count - 1)
        for size, readers in zip(graph.tensor_bytes, graph.readers, strict=True)
    )
    share = -(-(int(graph.permanent_bytes.sum()) + copies) // count)
    largest = max(int(one) + int(more) for one, more in zip(graph.permanent_bytes, arriving, strict=True))
    memory = share + largest + int(graph.temporary_bytes.max())
    for communication in COMMUNICATIONS:
        devices = devices_of(count, memory, communication=communication)
        assert earliest_task_first(graph, devices).makespan > 0
    bound = earliest_task_first_bound_ticks(graph, devices_of(count, memory))
    assert bound is not None or memory == largest + int(graph.temporary_bytes.max())


def test_the_bound_holds_for_equal_devices_parallel_transfers_and_single_operators_only() -> None:
    graph = paper_example()
    assert earliest_task_first_bound_ticks(graph, devices_of(2)) == 13.0
    assert earliest_task_first_bound_ticks(graph, devices_of(2, communication="links")) is None
    assert earliest_task_first_bound_ticks(graph, devices_of(2, [10**6, 10**5])) is None
    assert earliest_task_first_bound_ticks(graph, devices_of(2, 4)) is None
    unlike = graph_of([[1, 2]], [])
    assert earliest_task_first_bound_ticks(unlike, devices_of(2)) is None
    together = graph_of([[1, 1]] * 2, [], groups=(1, 1))
    assert earliest_task_first_bound_ticks(together, devices_of(2)) is None


def test_the_lower_bound_is_the_longest_chain_or_the_shared_work() -> None:
    assert lower_bound_ticks(paper_example()) == 8
    assert lower_bound_ticks(graph_of([[3, 3]] * 4, [])) == pytest.approx(6.0)
    # One device is three times as fast: it does three of four operators meanwhile.
    assert lower_bound_ticks(graph_of([[2, 6]] * 4, [])) == pytest.approx(6.0)
    # Each operator has a fast device of its own.
    assert lower_bound_ticks(graph_of([[1, 9], [9, 1]] * 3, [])) == pytest.approx(3.0)
    assert critical_path_ticks(paper_example(), devices_of(2)) == 11


def test_devices_without_room_count_for_nothing() -> None:
    # Six operators of 2 bytes: on devices of 6 bytes, they may fill the room for one more of all but one.
    graph = graph_of([[2, 2, 2]] * 6, [], permanent=[2] * 6)
    assert earliest_task_first_bound_ticks(graph, devices_of(3, 100)) == pytest.approx(12 / 3 + 2 * 2 / 3)
    assert earliest_task_first_bound_ticks(graph, devices_of(3, 6)) == pytest.approx(12)


def test_a_transfer_counts_over_the_shorter_operator_at_its_ends() -> None:
    graph = graph_of([[2, 6], [3, 3], [8, 8]], [(0, 10, [1]), (1, 4, [2]), (0, 2, [2])])
    ratios = communication_ratios(graph, devices_of(2, latency=1.0, per_byte=0.5))
    assert ratios.tolist() == pytest.approx([6 / 3, 2 / 4, 3 / 3])
