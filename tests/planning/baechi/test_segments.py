"""Segments of any placement form a graph without cycles, and each is convex."""

from __future__ import annotations

import numpy as np
import pytest
import rustworkx
from hypothesis import given
from hypothesis import strategies as st

from weft.planning.placement.graph import OperatorGraph
from weft.planning.planners.baechi.segments import segments


@st.composite
def placements(draw: st.DrawFn) -> tuple[OperatorGraph, list[int]]:
    count = draw(st.integers(1, 14))
    edges = [(a, b) for b in range(count) for a in range(b) if draw(st.integers(0, 3)) == 0]
    producers = sorted({producer for producer, _ in edges})
    reads = [(producers.index(producer), reader) for producer, reader in edges]
    ones = np.ones(count, dtype=np.int64)
    graph = OperatorGraph(
        names=[str(number) for number in range(count)],
        ticks=ones[:, None],
        permanent_bytes=ones,
        temporary_bytes=ones,
        producer=np.array(producers, dtype=np.int64),
        tensor_bytes=np.ones(len(producers), dtype=np.int64),
        reads=np.array(reads, dtype=np.int64).reshape(-1, 2),
        groups=np.arange(count),
    )
    return graph, draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))


@pytest.mark.parametrize("at_messages", [False, True])
@given(placements())
def test_segments_cover_all_operators_and_have_no_cycle(
    at_messages: bool, placed: tuple[OperatorGraph, list[int]]
) -> None:
    graph, device = placed
    found = segments(graph, np.array(device), np.arange(graph.operators), at_messages=at_messages)
    assert sorted(one for _, members in found for one in members) == list(range(graph.operators))
    assert all(device[one] == place for place, members in found for one in members)
    segment_of = {one: number for number, (_, members) in enumerate(found) for one in members}
    between = rustworkx.PyDiGraph()
    between.add_nodes_from(range(len(found)))
    for producer, reader in graph.edges.tolist():
        if segment_of[producer] != segment_of[reader]:
            between.add_edge(segment_of[producer], segment_of[reader], None)
    # A path that leaves a segment and comes back to it would be a cycle.
    assert rustworkx.is_directed_acyclic_graph(between)


@given(placements())
def test_with_cuts_at_messages_only_ends_of_segments_read_or_are_read_elsewhere(
    placed: tuple[OperatorGraph, list[int]],
) -> None:
    graph, device = placed
    found = segments(graph, np.array(device), np.arange(graph.operators), at_messages=True)
    for _, members in found:
        assert not any(
            device[producer] != device[reader] and (reader in members[1:] or producer in members[:-1])
            for producer, reader in graph.edges.tolist()
        )


def test_a_chain_on_two_devices_in_turn_is_cut_at_each_message() -> None:
    ones = np.ones(4, dtype=np.int64)
    graph = OperatorGraph(
        names=["a", "b", "c", "d"],
        ticks=np.ones((4, 2), dtype=np.int64),
        permanent_bytes=ones,
        temporary_bytes=ones,
        producer=np.arange(3),
        tensor_bytes=ones[:3],
        reads=np.array([(0, 1), (1, 2), (2, 3)]),
        groups=np.arange(4),
    )
    found = segments(graph, np.array([0, 1, 1, 0]), np.arange(4))
    assert found == [(0, [0]), (1, [1, 2]), (0, [3])]
