"""The program finds the best placement: that of all assignments and orders of few operators."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from random_operators import devices_of, graph_of, operator_graphs, questions

from weft.errors import InputError
from weft.planning.placement.exact import MOST_OPERATORS, exact
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.planning.placement.verification import scheduled


def best_of_all(graph: OperatorGraph, devices: Devices) -> int | None:
    """The least makespan of all devices and orders that fit."""
    orders = [
        np.array(order)
        for order in permutations(range(graph.operators))
        if all(order.index(made) < order.index(reader) for made, reader in graph.edges.tolist())
    ]
    found = []
    for choice in product(range(devices.count), repeat=graph.operators):
        if len({*zip(graph.groups.tolist(), choice, strict=True)}) > len(set(graph.groups.tolist())):
            continue
        for order in orders:
            placement = scheduled(graph, devices, np.array(choice), order)
            if (placement.peak_bytes > devices.memory_bytes).any():
                break
            found.append(placement.makespan)
    return min(found, default=None)


@settings(max_examples=25)
@given(asked=questions(most=4, communications=["parallel"], grouped=True))
def test_the_best_of_all_is_found_and_proved(asked: tuple[OperatorGraph, Devices]) -> None:
    graph, devices = asked
    best = best_of_all(graph, devices)
    if best is None:
        with pytest.raises(InputError, match="finds no placement"):
            exact(graph, devices)
    else:
        found = exact(graph, devices)
        assert (found.placement.makespan, found.proved) == (best, True)


@given(graph=operator_graphs(devices=2, most=7))
def test_without_time_the_better_heuristic_counts(graph: OperatorGraph) -> None:
    devices = devices_of(2)
    hurried, best = exact(graph, devices, seconds=0.0), exact(graph, devices)
    assert hurried.placement.makespan >= best.placement.makespan
    assert not hurried.proved or hurried.placement.makespan == best.placement.makespan


def test_too_many_operators_and_queues_are_refused() -> None:
    many = graph_of([[1, 1]] * (MOST_OPERATORS + 1), [])
    with pytest.raises(InputError, match="exact places up to 12 operators, not 13") as refused:
        exact(many, devices_of(2))
    assert len(str(refused.value).splitlines()) == 1
    with pytest.raises(InputError, match="exact places for parallel transfers, not links ones"):
        exact(graph_of([[1, 1]], []), devices_of(2, communication="links"))


def test_a_tensor_that_arrives_takes_memory() -> None:
    # Side by side, 1 and 2 need the tensor of 0 on both devices, which have room for one more byte only.
    graph = graph_of([[1, 1], [4, 4], [4, 4]], [(0, 3, [1, 2])], permanent=(1, 1, 1))
    assert exact(graph, devices_of(2, 4, latency=0.0)).placement.makespan == 5
    assert exact(graph, devices_of(2, 3, latency=0.0)).placement.makespan == 9
