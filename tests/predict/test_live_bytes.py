from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from predict.cost.machines import MODEL, cluster
from predict.plans import plan_of
from predict.programs import by_hand, costs_of

from weft.describe.families import layer_graph
from weft.planning.compile import compile_plan
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import live_curve, predict
from weft.predict.simulator import peak_live_bytes
from weft.program.kinds import BACKWARD, FORWARD

GRAPH = layer_graph(MODEL)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50)), min_size=1, max_size=8))
def test_the_peak_is_that_of_a_plain_walk_through_time(changes: list[tuple[int, int]]) -> None:
    """Every amount is added at some time and freed one tick later than the last addition."""
    times = [time for time, _ in changes] + [10] * len(changes)
    bytes_ = [amount for _, amount in changes] + [-amount for _, amount in changes]
    program = by_hand([(0, FORWARD, stage) for stage in range(len(times))], [])
    costs = costs_of(program, 0, live_bytes=bytes_, base_bytes=7)
    peak, position = peak_live_bytes(program, costs, np.array(times), 100)
    assert peak.tolist() == [7 + sum(amount for _, amount in changes)]
    assert bytes_[int(position[0])] > 0 or peak[0] == 7


def test_what_comes_early_for_the_next_step_is_added_to_what_is_still_held() -> None:
    program = by_hand([(0, FORWARD, 0), (0, FORWARD, 1)], [])
    costs = costs_of(program, 0, live_bytes=[10, -10])
    ends = np.array([1, 8])
    assert peak_live_bytes(program, costs, ends, 20)[0].tolist() == [10]
    assert peak_live_bytes(program, costs, ends, 5)[0].tolist() == [20]


def test_working_bytes_count_before_the_change_of_their_instruction() -> None:
    program = by_hand([(0, FORWARD, 0), (0, BACKWARD, 0)], [])
    ends = np.array([1, 2])
    for working, peak in ([0, 0], 10), ([0, 5], 15), ([12, 0], 12), ([12, 5], 15):
        costs = costs_of(program, 0, live_bytes=[10, -10], working_bytes=working)
        assert peak_live_bytes(program, costs, ends, 20)[0].tolist() == [peak]


def test_a_rank_without_instructions_holds_its_base() -> None:
    program = by_hand([(1, FORWARD, 0)], [])
    peak, position = peak_live_bytes(program, costs_of(program, 1, base_bytes=3), np.array([1]), 1)
    assert (peak.tolist(), position.tolist()) == ([3, 3], [-1, 0])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "breadth-first"])
def test_curves_begin_and_end_with_the_base_and_reach_the_peak(schedule: str) -> None:
    where = cluster()
    plan = plan_of(GRAPH, where, pp=2, schedule=schedule)
    program = compile_plan(plan, GRAPH)
    predicted = predict(CostModel(graph=GRAPH, cluster=where), plan, program)
    for rank in range(2):
        curve = live_curve(program, predicted, rank)
        base = int(predicted.priced.costs.base_bytes[rank])
        assert curve[0] == (0.0, base)
        assert curve[-1][1] == base
        assert max(live for _, live in curve) == predicted.prediction.peak_bytes[rank]
        assert [time for time, _ in curve] == sorted(time for time, _ in curve)
