"""The learned placer: the same for the same seed, better with more evaluations, within memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_operators import devices_of, graph_of, questions

from weft.errors import InputError
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.planning.placement.learned import improvements, lacking_bytes, learned
from weft.planning.placement.verification import check_placement, scheduled

ASKED = questions(grouped=True)


@settings(max_examples=20)
@given(asked=ASKED, seed=st.integers(0, 3))
def test_improvements_are_legal_and_each_is_better(asked: tuple[OperatorGraph, Devices], seed: int) -> None:
    graph, devices = asked
    found = [*improvements(graph, devices, evaluations=150, seed=seed)]
    again = [*improvements(graph, devices, evaluations=150, seed=seed)]
    makespans = [one.placement.makespan for one in found]
    assert makespans == sorted(set(makespans), reverse=True)
    assert [(one.evaluations, one.placement.makespan) for one in again] == [
        (one.evaluations, one.placement.makespan) for one in found
    ]
    for one in found:
        assert 1 <= one.evaluations <= 150
        assert check_placement(graph, devices, one.placement) == []
    if found:
        assert learned(graph, devices, evaluations=150, seed=seed).makespan == makespans[-1]


@given(data=st.data(), asked=ASKED)
def test_lacking_bytes_are_those_of_the_schedule(
    data: st.DataObject, asked: tuple[OperatorGraph, Devices]
) -> None:
    graph, devices = asked
    device = np.array([data.draw(st.integers(0, devices.count - 1)) for _ in range(graph.operators)])
    device = device[graph.groups]
    peaks = scheduled(graph, devices, device, np.arange(graph.operators)).peak_bytes
    assert lacking_bytes(graph, devices, device) == np.maximum(peaks - devices.memory_bytes, 0).sum()


def test_a_search_learns_two_chains_apart() -> None:
    # Ten draws of a thousand are right by chance; the search finds the best in a few rounds.
    chains = [(one, 5, [one + 2]) for one in range(8)]
    graph, devices = graph_of([[2, 2]] * 10, chains), devices_of(2, latency=9.0)
    assert learned(graph, devices, evaluations=1500).makespan == 10


def test_a_search_without_a_fitting_draw_says_so() -> None:
    graph = graph_of([[1, 1]], [], permanent=(9,))
    with pytest.raises(InputError, match="none of 20 drawn placements fits"):
        learned(graph, devices_of(2, 8), evaluations=20)
