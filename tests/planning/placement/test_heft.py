"""HEFT: ranks of the textbook, gaps that are filled, and memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from random_operators import devices_of, graph_of, questions

from weft.planning.placement.graph import Devices, OperatorGraph
from weft.planning.placement.heft import heterogeneous_earliest_finish, upward_ranks


@given(asked=questions())
def test_ranks_fall_along_edges(asked: tuple[OperatorGraph, Devices]) -> None:
    graph, devices = asked
    ranks = upward_ranks(graph, devices)
    own = graph.ticks.mean(axis=1)
    assert (ranks >= own).all()
    assert (ranks[graph.edges[:, 0]] >= own[graph.edges[:, 0]] + ranks[graph.edges[:, 1]] - 1e-9).all()


def test_the_example_of_the_textbook() -> None:
    # Topcuoglu, Hariri and Wu (2002), figure 1 and table 3: ranks by mean times, and a schedule of 80 ticks.
    ticks = [
        (14, 16, 9),
        (13, 19, 18),
        (11, 13, 19),
        (13, 8, 17),
        (12, 13, 10),
        (13, 16, 9),
        (7, 15, 11),
        (5, 11, 14),
        (18, 12, 20),
        (21, 7, 16),
    ]
    edges = [
        *((0, 18, 1), (0, 12, 2), (0, 9, 3), (0, 11, 4), (0, 14, 5), (1, 19, 7), (1, 16, 8), (2, 23, 6)),
        *((3, 27, 7), (3, 23, 8), (4, 13, 8), (5, 15, 7), (6, 17, 9), (7, 11, 9), (8, 13, 9)),
    ]
    graph = graph_of(ticks, [(made, size, [reader]) for made, size, reader in edges])
    devices = devices_of(3, latency=0.0, per_byte=1.0)
    expected = [108.0, 77.0, 80.0, 80.0, 69.0, 63.333, 42.667, 35.667, 44.333, 14.667]
    assert np.allclose(upward_ranks(graph, devices), expected, atol=1e-3)
    assert heterogeneous_earliest_finish(graph, devices).makespan == 80


def test_a_gap_is_filled() -> None:
    # 1 waits for the tensor of 0, which runs elsewhere as 1 has no room there; 2 fits before it.
    graph = graph_of([[9, 9], [9, 9], [2, 2]], [(0, 4, [1])], permanent=(6, 6, 4))
    devices = devices_of(2, [6, 16], latency=0.0, per_byte=1.0)
    placement = heterogeneous_earliest_finish(graph, devices)
    assert placement.device.tolist() == [0, 1, 1]
    assert placement.start.tolist() == [0, 13, 0]
    assert placement.sequence.tolist() == [0, 2, 1]
