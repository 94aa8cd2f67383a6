"""Planners and layers that were measured as tensor ranks run them: their rows decide, once."""

from __future__ import annotations

import pytest
from predict.cost.machines import CPU, MODEL, cluster, profile_of

from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layout import PartialLayout
from weft.planning.planners import get_planner
from weft.planning.planners.bounds import Bounds
from weft.planning.problem import Problem
from weft.predict.measurements import Measurements
from weft.predict.profile import LayerProfile

GRAPH = layer_graph(MODEL)
ONE, TWO = profile_of(GRAPH), profile_of(GRAPH, tp=2, times=0.6)
SIZE, SAMPLES = 2, 8


def posed(profile: LayerProfile, tp: int | None = None) -> Problem:
    job = Job(
        graph=GRAPH,
        cluster=cluster(nodes=1, devices=2, device=CPU),
        global_batch=SAMPLES,
        sequence=GRAPH.sequence,
        precision="fp32",
    )
    pins = PartialLayout(
        tp=tp,
        pp=1,
        micro_batch_size=SIZE,
        sharding="zero-0",
        recompute="none",
    )
    return Problem(job=job, model=MODEL, pins=pins, measurements=Measurements(profile=profile))


@pytest.mark.parametrize("name", ["homogeneous", "weft"])
def test_a_step_is_the_sum_of_its_rows(name: str) -> None:
    problem = posed(ONE.renewed(TWO), tp=2)
    (best, *_) = get_planner(name).search(problem).fitting
    assert best.plan is not None
    assert best.prediction is not None
    row = next(row for row in TWO.timings if row.micro_batch_size == SIZE)
    passes_s = SAMPLES // SIZE * (row.forward_s + row.backward_s)
    expected_s = len(GRAPH.layers) * (passes_s + row.update_s)
    assert best.prediction.step_s == pytest.approx(expected_s, rel=1e-6)
    assert Bounds(problem).step_s(best.layout) <= best.prediction.step_s * (1 + 1e-9)


@pytest.mark.parametrize(("times", "chosen"), [(0.3, 2), (3.0, 1)])
def test_a_search_takes_the_degree_whose_rows_are_faster(times: float, chosen: int) -> None:
    profile = ONE.renewed(profile_of(GRAPH, tp=2, times=times))
    best = get_planner("weft").search(posed(profile)).fitting[0]
    assert best.layout.tp == chosen


def test_a_degree_without_rows_is_passed_over_with_the_remedy() -> None:
    ranking = get_planner("homogeneous").search(posed(ONE, tp=2))
    assert not ranking.fitting
    assert "weft measure MODEL --tensor-parallel 2 adds it" in ranking.candidates[0].reason
