"""What sets each baseline apart: its rules, its formula, its search."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.describe.layout import PartialLayout
from weft.moves.layout import build_plan
from weft.moves.partition import uniform_partition
from weft.moves.pipeline_partition import pipeline_partition
from weft.planning.planners import Verdict, get_planner
from weft.planning.planners.annealing import AnnealingPlanner
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.layer_times import ProblemLayerTimes
from weft.planning.planners.metis_form import MetisFormPlanner, metis_form, metis_form_s, shared_by_speed
from weft.planning.planners.simulated import simulated
from weft.planning.planners.space import by_count
from weft.planning.problem import Problem, problem_of


def posed(on: str, batch: int = 32, model: str = "gpt-1m", **pins: object) -> Problem:
    return problem_of(model=model, on=on, global_batch=batch, precision="fp16", pins=PartialLayout(**pins))  # type: ignore[arg-type]


def test_megatron_divides_the_model_no_further_than_memory_asks_for() -> None:
    roomy = get_planner("megatron").search(posed("8xa100-80gb"))
    assert {(one.layout.pp, one.layout.tp) for one in roomy.fitting} == {(1, 1)}
    tight = get_planner("megatron").search(posed("8xa100-80gb", model="llama-13b"))
    best = tight.fitting[0].layout
    assert (best.pp, best.tp) == (1, 4)
    by_degrees = {(one.layout.pp, one.layout.tp): one for one in tight.candidates}
    assert by_degrees[1, 1].verdict is by_degrees[1, 2].verdict is Verdict.TOO_BIG
    assert by_degrees[2, 2].reason == "less model parallelism fits"


def test_megatron_adds_stages_when_a_node_is_full_of_tensor_ranks() -> None:
    ranking = get_planner("megatron").search(posed("16xv100-16gb", model="llama-7b", batch=16))
    nodes = posed("16xv100-16gb").job.cluster.groups[0].devices
    best = ranking.fitting[0].layout
    assert best.pp > 1
    assert best.tp == nodes


def test_the_formula_of_megatron_sweeps_the_micro_batch() -> None:
    problem = posed("4xa100-80gb", dp=2, pp=2)
    ranking = get_planner("megatron").search(problem)
    bounds = Bounds(problem)
    for one in ranking.fitting:
        stage_s = max(bounds.stage_seconds(one.layout))
        in_a_replica = 32 // 2 // one.layout.micro_batch_size
        assert one.estimate_s == pytest.approx((in_a_replica + 2 - 1) * stage_s)
    assert [one.layout.micro_batch_size for one in ranking.fitting] != sorted(
        one.layout.micro_batch_size for one in ranking.fitting
    )


@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 2), st.integers(0, 4))
def test_shares_by_count_differ_by_one_between_the_ends(
    blocks: int, stages: int, leading: int, trailing: int
) -> None:
    counts = uniform_partition(blocks + leading + trailing, stages, leading, trailing)
    if counts is None:
        assert blocks < stages
        return
    assert sum(counts) == blocks + leading + trailing
    counts = (counts[0] - leading, *counts[1:])
    counts = (*counts[:-1], counts[-1] - trailing)
    assert max(counts) - min(counts) <= 1
    assert list(counts) == sorted(counts, reverse=True)


def test_uniform_shares_blocks_out_by_count_and_leaves_the_ends_where_they_are() -> None:
    problem = posed("8xa100-80gb")
    for one in get_planner("uniform").search(problem).candidates:
        if one.layout.stages == 4:
            assert one.layout.layers_per_stage == (2, 1, 1, 2)
        if one.layout.stages == 8:
            assert "the model has 6 layers" in one.reason
    (layout,) = (
        one for one in get_planner("uniform").space(posed("6xa100-80gb", batch=1)) if one.stages == 6
    )
    assert by_count(problem, layout).layers_per_stage == (1,) * 6


def test_a_model_without_blocks_is_shared_out_layer_by_layer() -> None:
    problem = posed("2xa100-80gb", model="alexnet-tiny", pp=2)
    layers = len(problem.job.graph.layers)
    expected = (layers - layers // 2, layers // 2)
    assert {one.layers_per_stage for one in get_planner("uniform").space(problem)} == {expected}


def test_annealing_ends_no_higher_than_it_starts_and_depends_on_its_seed() -> None:
    problem = posed("8xa100-80gb+8xt4")
    rankings = [AnnealingPlanner(seed=seed, trials=30, finalists=1).search(problem) for seed in (0, 1)]
    starts = [
        one.estimate_s
        for one in rankings[0].candidates
        if one.layout.rank_order is None and one.layout.dp == 16 and one.estimate_s is not None
    ]
    for ranking in rankings:
        assert ranking.candidates[0].estimate_s is not None
        assert ranking.candidates[0].estimate_s <= min(starts)
    first, second = ({str(one.layout) for one in ranking.candidates} for ranking in rankings)
    assert first != second


def test_annealing_tries_other_places_where_nodes_differ() -> None:
    ranking = AnnealingPlanner(trials=60).search(posed("8xa100-80gb+8xt4"))
    orders = {one.layout.rank_order for one in ranking.candidates}
    assert len(orders) > 3
    placed = [one for one in ranking.candidates if one.layout.rank_order is not None]
    assert any(one.plan is not None for one in placed)


def test_without_moves_annealing_has_its_two_starts() -> None:
    ranking = AnnealingPlanner(trials=0).search(posed("4xa100-80gb", batch=4))
    found = {(one.layout.tp, one.layout.dp) for one in ranking.candidates if one.estimate_s is not None}
    assert found == {(4, 1), (1, 4)}


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6), st.integers(0, 60))
def test_shares_follow_the_speeds(speeds: list[float], more: int) -> None:
    total = len(speeds) + more
    shares = shared_by_speed(np.array(speeds), total)
    assert sum(shares) == total
    assert min(shares) >= 1
    # Nobody would end sooner by giving one to another.
    longest = max(
        share / speed for share, speed in zip(shares, speeds, strict=True) if share > 1 or more == 0
    )
    soonest = min((share + 1) / speed for share, speed in zip(shares, speeds, strict=True))
    assert longest <= soonest * (1 + 1e-9) or max(shares) == 1


def test_metis_form_is_the_closed_form_where_devices_are_alike() -> None:
    problem = posed("4xa100-80gb", pp=4, tp=1)
    times = ProblemLayerTimes(problem)
    for one in get_planner("metis-form").search(problem).fitting:
        layout = one.layout
        assert layout.rank_order is layout.micro_batches_per_replica is None
        both_s = times.of_group(0, layout.micro_batch_size, 1).both_s
        starts = np.cumsum([0, *(layout.layers_per_stage or ())])[:-1]
        stage_s = np.add.reduceat(both_s, starts)
        link = problem.job.cluster.groups[0].link
        sent = 3 * 2 * layout.micro_batch_size * problem.job.sequence * problem.model.hidden
        expected = (
            (32 // layout.micro_batch_size - 1) * stage_s.max() + stage_s.sum() + sent / link.bytes_per_s
        )
        assert one.estimate_s == pytest.approx(expected)


def test_the_closed_form_is_that_of_the_slowest_replica() -> None:
    # Two stages, two replicas, the second of which is three times slower in the second stage.
    work_s = np.ones((2, 2, 4))
    work_s[1, 1] = 3.0
    found = metis_form(work_s, np.full((1, 4), 0.5), 8)
    first, second = found.layers_per_stage
    assert (first + second, first > second) == (4, True)
    assert found.micro_batches == (4, 4)
    one_s = (4 - 1) * max(first, second) + first + second
    other_s = (4 - 1) * max(first, 3 * second) + first + 3 * second
    assert found.pipeline_s == pytest.approx(max(one_s, other_s) + 0.5)


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 12))
def test_equal_replicas_have_the_time_of_one(stages: int, replicas: int, more: int) -> None:
    layer_s = np.linspace(1.0, 2.0, 5)
    whole = np.broadcast_to(layer_s, (stages, replicas, 5))
    alone = pipeline_partition(whole[:, 0], np.zeros((stages - 1, 5)), 1 + more)
    found = metis_form(whole, np.zeros((stages - 1, 5)), replicas * (1 + more))
    assert found.micro_batches == (1 + more,) * replicas
    assert found.layers_per_stage == alone.layers_per_stage
    assert found.pipeline_s == pytest.approx(alone.seconds)


def test_metis_form_gives_faster_devices_more_layers_and_chooses_who_comes_first() -> None:
    problem = posed("4xa100-80gb+4xt4", model="gpt2", pp=2, tp=4)
    ranking = get_planner("metis-form").search(problem)
    assert {one.layout.rank_order for one in ranking.candidates} == {None, (4, 5, 6, 7, 0, 1, 2, 3)}
    for one in ranking.fitting:
        assert one.layout.layers_per_stage is not None
        fast = 0 if one.layout.rank_order is None else 1
        assert one.layout.layers_per_stage[fast] > one.layout.layers_per_stage[1 - fast]


def test_metis_form_shares_the_batch_out_by_speed_and_gains_by_it() -> None:
    problem = posed("1xa100-80gb+1xt4", batch=64, model="gpt2", pp=1, micro_batch_size=1)
    (one,) = MetisFormPlanner().search(problem).fitting
    shares = one.layout.micro_batches_per_replica
    assert shares is not None
    assert shares[0] > shares[1]
    bounds = Bounds(problem)
    equal = simulated(problem, replace(one, layout=one.layout.regular), bounds.layer_seconds(one.layout))
    assert equal.plan is not None
    assert equal.prediction is not None
    assert one.plan is not None
    assert one.prediction is not None
    assert one.prediction.step_s < 0.8 * equal.prediction.step_s
    plan = build_plan(problem.job, one.layout, bounds.layer_seconds(one.layout))
    assert [copy.micro_batches for copy in plan.stages[0].replicas] == list(shares)


def test_the_closed_form_of_a_given_layout_is_the_one_it_is_ranked_by() -> None:
    problem = posed("4xa100-80gb+4xv100-32gb", batch=64)
    ranking = get_planner("metis-form").search(problem)
    estimated = [one for one in ranking.candidates if one.estimate_s is not None]
    assert len({one.layout.pp for one in estimated}) > 1
    for one in estimated:
        assert metis_form_s(problem, one.layout) == one.estimate_s
