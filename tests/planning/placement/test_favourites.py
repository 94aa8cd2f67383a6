"""Favourite children: a matching by a linear program, whose optimum lies where it must."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_operators import (
    critical_path_ticks,
    device_sets,
    devices_of,
    operator_graphs,
    paper_example,
    questions,
    scaled,
)

from weft.planning.placement.bounds import longest_chain
from weft.planning.placement.exact import exact
from weft.planning.placement.favourites import favourites
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.planning.placement.list_scheduler import earliest_task_first, small_communication_times

ASKED = questions(communications=["parallel"])


def without_transfers(graph: OperatorGraph) -> float:
    return longest_chain(graph, graph.ticks.mean(axis=1), np.zeros(len(graph.edges)))


def with_transfers(graph: OperatorGraph, devices: Devices) -> float:
    transfers = devices.least_transfer_ticks(graph.edge_bytes).astype(np.float64)
    return longest_chain(graph, graph.ticks.mean(axis=1), transfers)


@pytest.mark.parametrize("most_operators", [0, 100])
@given(asked=ASKED, threshold=st.sampled_from([0.1, 0.5]))
def test_favourites_are_edges_and_a_matching(
    most_operators: int, asked: tuple[OperatorGraph, Devices], threshold: float
) -> None:
    graph, devices = asked
    found = favourites(graph, devices, threshold=threshold, most_operators=most_operators)
    assert len(set(found.children.values())) == len(found.children)
    assert set(found.children.items()) <= {tuple(edge) for edge in graph.edges.tolist()}
    assert (found.optimum_ticks is None) == (not len(graph.edges) or not most_operators)
    assert without_transfers(graph) - 1e-6 <= found.makespan_ticks
    assert found.makespan_ticks <= with_transfers(graph, devices) + 1e-6


@given(asked=ASKED)
def test_the_optimum_lies_between_the_longest_chains(asked: tuple[OperatorGraph, Devices]) -> None:
    graph, devices = asked
    found = favourites(graph, devices)
    if found.optimum_ticks is not None:
        assert without_transfers(graph) <= found.optimum_ticks + 1e-5
        # Every x = 1 is feasible.
        assert found.optimum_ticks <= with_transfers(graph, devices) + 1e-5


@given(st.data())
def test_with_small_transfers_the_optimum_is_a_bound(data: st.DataObject) -> None:
    graph = data.draw(operator_graphs(devices=2, most=6, alike=True))
    devices = devices_of(2, latency=float(graph.ticks.min()))
    found = favourites(graph, devices)
    if found.optimum_ticks is not None:
        assert found.optimum_ticks <= exact(graph, devices).placement.makespan + 1e-5


@given(st.data())
def test_times_scale_the_optimum(data: st.DataObject) -> None:
    graph = data.draw(operator_graphs(devices=2, alike=True))
    one = favourites(graph, devices_of(2, latency=2.0))
    other = favourites(scaled(graph, 1000), devices_of(2, latency=2000.0))
    if one.optimum_ticks is not None:
        assert other.optimum_ticks == pytest.approx(1000 * one.optimum_ticks, rel=1e-6)


@given(asked=questions())
def test_without_favourites_the_earliest_task_is_first(asked: tuple[OperatorGraph, Devices]) -> None:
    graph, devices = asked
    none = favourites(graph, devices, threshold=0.0).children
    assert none == {}
    generous = Devices(
        memory_bytes=devices.memory_bytes + 10**6,
        latency_ticks=devices.latency_ticks,
        ticks_per_byte=devices.ticks_per_byte,
        communication=devices.communication,
    )
    one, other = small_communication_times(graph, generous, none), earliest_task_first(graph, generous)
    assert np.array_equal(one.start, other.start)
    assert np.array_equal(one.device, other.device)


def test_the_program_keeps_the_long_chain_of_the_example_together() -> None:
    found = favourites(paper_example(), devices_of(2))
    assert found.children == {0: 1, 1: 2, 2: 5, 3: 4}
    assert found.optimum_ticks == pytest.approx(8.0)
    assert critical_path_ticks(paper_example(), devices_of(2)) == 11


@given(st.data())
def test_the_greedy_matching_avoids_no_less_than_nothing(data: st.DataObject) -> None:
    graph = data.draw(operator_graphs(devices=3))
    devices = data.draw(device_sets(graph))
    greedy = favourites(graph, devices, most_operators=0)
    solved = favourites(graph, devices)
    if solved.optimum_ticks is not None:
        assert solved.optimum_ticks <= greedy.makespan_ticks + 1e-5
