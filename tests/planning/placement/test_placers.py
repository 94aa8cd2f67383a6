"""Every placer's placements: legal, timed as they replay, and no better than the best."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_operators import devices_of, graph_of, operator_graphs, paper_example, questions

from weft.errors import InputError
from weft.planning.placement.board import Placement
from weft.planning.placement.bounds import lower_bound_ticks
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.planning.placement.placers import BAECHI, PLACERS, get_placer
from weft.planning.placement.verification import check_placement, replayed

FAST = [name for name in PLACERS if name not in ("exact", "learned", "repair")]


def placed(name: str, graph: OperatorGraph, devices: Devices) -> Placement | None:
    """What a placer answers; None if it refuses."""
    try:
        return PLACERS[name](graph, devices)
    except InputError:
        return None


@pytest.mark.parametrize("name", FAST)
@given(data=st.data())
def test_placements_are_legal_and_replay_exactly(name: str, data: st.DataObject) -> None:
    graph, devices = data.draw(questions(grouped=data.draw(st.booleans())))
    placement = placed(name, graph, devices)
    if placement is not None:
        assert check_placement(graph, devices, placement) == []
        again = replayed(graph, devices, placement)
        assert np.array_equal(again.start, placement.start)
        assert again.transfers == placement.transfers
        assert again.makespan == placement.makespan >= lower_bound_ticks(graph) * (1 - 1e-12)


@pytest.mark.parametrize("name", FAST)
@given(graph=operator_graphs(devices=1))
def test_one_device_works_without_a_gap(name: str, graph: OperatorGraph) -> None:
    assert PLACERS[name](graph, devices_of(1)).makespan == graph.ticks.sum()


@given(asked=questions(most=7, communications=["parallel"], grouped=True))
def test_none_beats_the_best(asked: tuple[OperatorGraph, Devices]) -> None:
    graph, devices = asked
    best = placed("exact", graph, devices)
    others = [placement for name in FAST if (placement := placed(name, graph, devices)) is not None]
    assert best is not None or not others
    if best is not None:
        assert check_placement(graph, devices, best) == []
        assert all(best.makespan <= one.makespan for one in others)


@given(st.data())
def test_the_earliest_task_first_is_near_the_best_without_transfers(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 3))
    graph = data.draw(operator_graphs(devices=count, most=7, alike=True))
    devices = devices_of(count, latency=0.0)
    best, greedy = PLACERS["exact"](graph, devices), PLACERS["m-etf"](graph, devices)
    assert greedy.makespan <= (2 - 1 / count) * best.makespan


@pytest.mark.parametrize("name", ["m-etf", "m-sct"])
@pytest.mark.parametrize(("memory_bytes", "makespan"), [(100, 8), (5, 9), (4, 9)])
def test_the_example_of_the_paper(name: str, memory_bytes: int, makespan: int) -> None:
    graph, devices = paper_example(), devices_of(2, memory_bytes)
    placement = PLACERS[name](graph, devices)
    assert placement.makespan == makespan
    if memory_bytes == 100:
        together = [np.flatnonzero(placement.device == device).tolist() for device in range(2)]
        assert sorted(together) == [[0, 1, 2, 5], [3, 4]]


@pytest.mark.parametrize("name", BAECHI)
def test_no_operators_take_no_time(name: str) -> None:
    graph = graph_of(np.ones((0, 2), dtype=np.int64), [])
    assert PLACERS[name](graph, devices_of(2)).makespan == 0


@pytest.mark.parametrize("name", ["m-etf", "m-sct", "heft"])
def test_an_operator_that_is_too_large_is_named_with_what_is_missing(name: str) -> None:
    graph = graph_of([[1, 1]] * 3, [(0, 2, [1])], permanent=(1, 9, 1))
    with pytest.raises(
        InputError, match="'operator 1' fits on no device: device 0 lacks least, 2 B"
    ) as refused:
        PLACERS[name](graph, devices_of(2, [8, 7]))
    assert len(str(refused.value).splitlines()) == 1


def test_an_operator_that_must_be_elsewhere_is_refused_there() -> None:
    # Operator 1 has its group's device, where its input does not fit any more.
    graph = graph_of([[1, 1]] * 3, [(0, 5, [2])], permanent=(4, 4, 0), groups=(0, 1, 1))
    with pytest.raises(
        InputError, match="'operator 2' must be on device 1, which lacks 1 B, and has 4 B left"
    ):
        PLACERS["m-etf"](graph, devices_of(2, 8))


def test_unknown_placers_are_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="m-etf"):
        get_placer("m-eft")
