"""Fewer operators: with the same sums, in no cycle, and any placement of them is one of the original."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_operators import AMPLE, COMMUNICATIONS, device_sets, devices_of, graph_of, operator_graphs

from weft.errors import InputError
from weft.planning.placement.bounds import lower_bound_ticks
from weft.planning.placement.graph import Devices
from weft.planning.placement.list_scheduler import earliest_task_first
from weft.planning.placement.preparation import CoPlacement, PreparedGraph, prepared
from weft.planning.placement.verification import check_placement, scheduled

WAYS: tuple[CoPlacement, ...] = ("readers", "chains", "none")


@st.composite
def preparations(draw: st.DrawFn) -> tuple[PreparedGraph, Devices]:
    graph = draw(operator_graphs(devices=draw(st.integers(1, 3)), most=16, grouped=draw(st.booleans())))
    devices = draw(device_sets(graph, draw(st.sampled_from(COMMUNICATIONS))))
    return prepared(graph, devices, draw(st.sampled_from(WAYS))), devices


@given(made=preparations())
def test_sums_stay_and_operators_stay_in_order(made: tuple[PreparedGraph, Devices]) -> None:
    preparation, _ = made
    original, fused = preparation.original, preparation.fused
    assert np.array_equal(fused.ticks.sum(axis=0), original.ticks.sum(axis=0))
    assert fused.permanent_bytes.sum() == original.permanent_bytes.sum()
    assert fused.temporary_bytes.max() == original.temporary_bytes.max()
    assert (fused.edges[:, 0] < fused.edges[:, 1]).all()
    ends = preparation.member_of[original.edges]
    apart = ends[ends[:, 0] != ends[:, 1]]
    assert {tuple(one) for one in apart.tolist()} == {tuple(one) for one in fused.edges.tolist()}
    assert np.array_equal(fused.groups[preparation.member_of], original.groups)
    assert lower_bound_ticks(fused) >= lower_bound_ticks(original) * (1 - 1e-12)


@given(made=preparations())
def test_a_placement_of_fused_operators_is_one_of_the_original(made: tuple[PreparedGraph, Devices]) -> None:
    preparation, devices = made
    try:
        placement = earliest_task_first(preparation.fused, devices)
    except InputError:
        return
    unfused = scheduled(
        preparation.original,
        devices,
        preparation.unfused(placement.device),
        preparation.sequence(placement),
    )
    assert check_placement(preparation.original, devices, unfused) == []
    assert (unfused.peak_bytes <= placement.peak_bytes).all()
    if devices.communication == "parallel":
        assert unfused.makespan <= placement.makespan


@given(st.data())
def test_groups_that_have_joined_join_nobody_else(data: st.DataObject) -> None:
    graph = data.draw(operator_graphs(devices=2, most=16))
    devices, way = data.draw(device_sets(graph)), data.draw(st.sampled_from(WAYS))
    once = prepared(graph, devices, way)
    assert np.array_equal(prepared(once.original, devices, way).original.groups, once.original.groups)


@given(st.data())
def test_groups_leave_room_for_each_other(data: st.DataObject) -> None:
    graph = data.draw(operator_graphs(devices=3, most=16))
    memory = data.draw(st.integers(1, 60))
    made = prepared(graph, devices_of(3, memory), "readers").original
    most = (3 * memory - int(graph.permanent_bytes.sum())) / 3 - int(graph.temporary_bytes.max())
    for group in np.unique(made.groups):
        members = made.groups == group
        assert members.sum() == 1 or graph.permanent_bytes[members].sum() <= most / 2


def test_a_chain_is_one_operator_where_memory_allows() -> None:
    chain = graph_of([[1, 1]] * 6, [(one, 1, [one + 1]) for one in range(5)], permanent=[4] * 6)
    assert prepared(chain, devices_of(2, AMPLE)).fused.operators == 1
    # 24 of 32 bytes are taken: groups have at most (32 - 24) / 2 / 2 bytes, less than an operator.
    assert prepared(chain, devices_of(2, 16)).fused.operators == 6
    assert prepared(chain, devices_of(2, 28)).member_of.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("way", "operators"), [("readers", 2), ("chains", 4), ("none", 4)])
def test_an_operator_joins_its_only_reader(way: CoPlacement, operators: int) -> None:
    # 0 is read by 1 and 2, which 3 alone reads; a transfer is shorter than any operator.
    diamond = graph_of([[5, 5]] * 4, [(0, 1, [1, 2]), (1, 1, [3]), (2, 1, [3])])
    assert prepared(diamond, devices_of(2), way).fused.operators == operators


def test_a_short_operator_joins_its_neighbour_until_both_are_long() -> None:
    # 0 and 1 are read by 2 alone. A transfer takes 4 ticks: 0 joins 2, and then 1 of 5 ticks stays apart.
    graph = graph_of([[1, 1], [5, 5], [3, 3]], [(0, 0, [2]), (1, 0, [2])])
    made = prepared(graph, devices_of(2, latency=4.0), "chains")
    assert made.member_of.tolist() == [1, 0, 1]


def test_members_of_a_loop_between_groups_stay_apart() -> None:
    # 0 and 2 share a device, and so do 1 and 3; contracting either would make a cycle with the other.
    graph = graph_of([[1, 1]] * 4, [(0, 1, [1, 2]), (1, 1, [2, 3]), (2, 1, [3])], groups=(0, 1, 0, 1))
    fused = prepared(graph, devices_of(2), "none").fused
    assert (fused.edges[:, 0] < fused.edges[:, 1]).all()
    assert fused.operators == 4
