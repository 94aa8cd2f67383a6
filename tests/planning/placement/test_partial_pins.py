"""Operators with given devices, and others that are placed around them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import InputError
from weft.planning.placement.board import UNPLACED
from weft.planning.placement.graph import Communication, Devices, OperatorGraph
from weft.planning.placement.list_scheduler import earliest_task_first

DEVICES = 3


@st.composite
def graphs(draw: st.DrawFn) -> OperatorGraph:
    """Draw up to eight operators of unlike times, each of which reads some of those before it."""
    count = draw(st.integers(1, 8))
    pairs = [(first, last) for last in range(count) for first in range(last)]
    reads = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    producers = sorted({first for first, _ in reads})
    some = st.lists(st.integers(1, 9), min_size=count, max_size=count)
    return OperatorGraph(
        names=[str(number) for number in range(count)],
        ticks=np.array([draw(some) for _ in range(DEVICES)], dtype=np.int64).T.copy(),
        permanent_bytes=np.array(draw(some), dtype=np.int64),
        temporary_bytes=np.zeros(count, dtype=np.int64),
        producer=np.array(producers, dtype=np.int64),
        tensor_bytes=np.ones(len(producers), dtype=np.int64),
        reads=np.array(
            sorted((producers.index(first), last) for first, last in reads), dtype=np.int64
        ).reshape(-1, 2),
        groups=np.arange(count, dtype=np.int64),
    )


def devices(memory_bytes: int, communication: Communication = "links") -> Devices:
    return Devices(
        memory_bytes=np.full(DEVICES, memory_bytes, dtype=np.int64),
        latency_ticks=np.full((DEVICES, DEVICES), 2.0),
        ticks_per_byte=np.ones((DEVICES, DEVICES)),
        communication=communication,
    )


@given(graphs(), st.data())
def test_pinned_operators_stay_and_the_others_find_places(graph: OperatorGraph, data: st.DataObject) -> None:
    place = st.integers(UNPLACED, DEVICES - 1)
    pinned = data.draw(st.lists(place, min_size=graph.operators, max_size=graph.operators))
    placement = earliest_task_first(graph, devices(10**6), pinned=pinned)
    assert all(own in (UNPLACED, found) for own, found in zip(pinned, placement.device.tolist(), strict=True))
    # Pins that say what a placement has decided give it again.
    again = earliest_task_first(graph, devices(10**6), pinned=placement.device.tolist())
    assert again.device.tolist() == placement.device.tolist()


@given(graphs(), st.sampled_from(["links", "parallel", "sequential"]))
def test_no_pins_are_pins_that_are_all_open(graph: OperatorGraph, communication: Communication) -> None:
    free = earliest_task_first(graph, devices(10**6, communication))
    opened = earliest_task_first(graph, devices(10**6, communication), pinned=[UNPLACED] * graph.operators)
    assert free.sequence.tolist() == opened.sequence.tolist()
    assert free.device.tolist() == opened.device.tolist()


def two_alone(memory_bytes: int) -> tuple[OperatorGraph, Devices]:
    """Return a small operator before a large one; only device 0 has room for the large one."""
    graph = OperatorGraph(
        names=["small", "large"],
        ticks=np.array([[1, 9, 9], [1, 9, 9]], dtype=np.int64),
        permanent_bytes=np.array([4, 8], dtype=np.int64),
        temporary_bytes=np.zeros(2, dtype=np.int64),
        producer=np.zeros(1, dtype=np.int64),
        tensor_bytes=np.zeros(1, dtype=np.int64),
        reads=np.array([[0, 1]], dtype=np.int64),
        groups=np.arange(2, dtype=np.int64),
    )
    return graph, devices(memory_bytes)


def test_pinned_operators_keep_room_before_others_come() -> None:
    graph, where = two_alone(8)
    assert earliest_task_first(graph, where, pinned=[UNPLACED, 0]).device.tolist() == [1, 0]


def test_a_pinned_operator_without_room_is_named() -> None:
    graph, where = two_alone(7)
    with pytest.raises(InputError, match="operator 'large' must be on device 0, which lacks 1 B"):
        earliest_task_first(graph, where, pinned=[UNPLACED, 0])
