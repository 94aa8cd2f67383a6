"""The `amp` planner: its inputs are weft's figures, its order is AMP's, its verdicts are weft's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from weft.describe.amount import Shape
from weft.describe.cluster_file import cluster_of
from weft.describe.layout import PartialLayout
from weft.planning.planners import Verdict, get_planner
from weft.planning.planners.amp import amp_search, degrees_of
from weft.planning.planners.amp.inputs import amp_inputs, node_bandwidths
from weft.planning.problem import Problem, problem_of
from weft.predict.cost.compute import ComputeModel
from weft.predict.cost.network import Network

SEARCH = get_planner("amp").search
MIXED = "8xa100-80gb+8xt4"


def mixed(batch: int = 32) -> Problem:
    return problem_of(model="gpt-1m", on=MIXED, global_batch=batch, precision="fp16", launch="captured")


def test_unlike_devices_are_averaged_by_their_share_of_the_nodes() -> None:
    problem = mixed()
    job, cluster = problem.job, problem.job.cluster
    assert [group.count for group in cluster.groups] == [1, 2]
    (block,) = [index for index, layer in enumerate(job.graph.layers) if layer.name == "block.0"]
    seconds = [
        ComputeModel()
        .stage_times(job.graph, (block,), Shape(1, job.sequence), "fp16", group.device)
        .forward_s
        for group in cluster.groups
    ]
    profile = amp_inputs(problem, [1]).forward_s[1]
    assert profile[block] == pytest.approx((seconds[0] + 2 * seconds[1]) / 3)
    assert profile[block] == profile[block + 1]


def test_the_profile_contains_the_collectives_of_tensor_ranks() -> None:
    problem = problem_of(model="gpt-1m", on="8xa100-80gb", global_batch=8, launch="captured")
    job, shape = problem.job, Shape(1, problem.job.sequence, 4)
    layer = job.graph.layers[1]
    times = ComputeModel().stage_times(job.graph, (1,), shape, "bf16", job.cluster.groups[0].device)
    each = round(2 * layer.tensor_reduced(shape) / layer.tensor_exchanges)
    reduced_s = layer.tensor_exchanges * Network(cluster=job.cluster).all_reduce_s(range(4), each)
    assert reduced_s > 0
    assert amp_inputs(problem, [4]).forward_s[4][1] == pytest.approx(times.forward_s + reduced_s)


def test_gradients_are_four_bytes_each_and_tied_ones_count_once_in_a_stage() -> None:
    gpt2 = problem_of(model="gpt2", on="8xa100-80gb", global_batch=8)
    inputs = amp_inputs(gpt2, [1])
    (tied,) = gpt2.job.graph.tied
    assert inputs.shared_layers == tied.layers == (0, len(gpt2.job.graph.layers) - 1)
    assert inputs.shared_bytes is not None
    assert inputs.shared_bytes[1] == 4 * tied.parameters(Shape(1, 1024))
    whole = sum(inputs.gradient_bytes[1]) + inputs.shared_bytes[1]
    assert whole == pytest.approx(4 * gpt2.job.graph.parameters())
    for strategy in amp_search(inputs):
        if strategy.degrees.pipeline_parallel == 1:
            replicas = strategy.degrees.data_parallel
            expected = 2 * (replicas - 1) / replicas * whole / inputs.bandwidth[0, 0]
            assert strategy.reduction_s == pytest.approx(expected)


def test_bandwidths_are_those_inside_nodes_and_between_them() -> None:
    cluster = mixed().job.cluster
    table = node_bandwidths(cluster)
    assert table.shape == (3, 3)
    for rank, other in ((0, 1), (8, 9), (0, 8), (8, 12)):
        nodes = [0 if one < 8 else 1 + (one - 8) // 4 for one in (rank, other)]
        assert table[nodes[0], nodes[1]] == cluster.link_between(rank, other).bytes_per_s
    assert np.array_equal(table, table.T)


def test_the_order_is_that_of_amp_and_the_plans_are_priced() -> None:
    ranking = SEARCH(mixed())
    estimates = [one.estimate_s for one in ranking.candidates if one.estimate_s is not None]
    assert estimates == sorted(estimates)
    steps = [one.prediction.step_s for one in ranking.fitting if one.prediction]
    assert len(steps) == len(ranking.fitting) == 8
    assert steps != sorted(steps)
    left = [one for one in ranking.candidates if one.verdict is Verdict.PRUNED]
    assert all("others less" in one.reason for one in left)


def test_every_strategy_is_answered_for() -> None:
    problem = mixed()
    ranking = SEARCH(problem)
    inputs = amp_inputs(problem, [1, 2, 4])
    estimated = [one for one in ranking.candidates if one.estimate_s is not None]
    assert [(one.layout.tp, one.layout.dp) for one in estimated] == [
        one.degrees[:2] for one in amp_search(inputs)
    ]
    assert len(ranking.candidates) == len(list(degrees_of(inputs)))
    refused = {one.reason for one in ranking.candidates if one.verdict is Verdict.REFUSED}
    assert any("the model has 6 layers to spread" in reason for reason in refused)


def test_what_does_not_fit_keeps_its_place() -> None:
    problem = problem_of(model="llama-13b", on="8xa100-80gb", global_batch=32)
    ranking = SEARCH(problem)
    assert ranking.candidates[0].verdict is Verdict.TOO_BIG
    assert "more than its device has" in ranking.candidates[0].reason
    assert ranking.fitting


def test_a_node_that_the_tensor_degree_does_not_divide_is_named() -> None:
    pins = PartialLayout(tp=2, dp=1, pp=1)
    problem = problem_of(model="gpt-1m", on="3xt4", global_batch=8, precision="fp16", pins=pins)
    assert {one.reason for one in SEARCH(problem).candidates} == {
        "tp 2 does not divide the 3 devices of a node of t4"
    }


def test_slower_devices_of_a_group_slow_the_profile() -> None:
    def of(speeds: str) -> float:
        record = {"node": [{"name": "a", "count": 1, "device": "a100-80gb", "devices": 2}]}
        if speeds:
            record["node"][0]["speeds"] = [1.0, 0.5]  # type: ignore[assignment]
        problem = problem_of(model="gpt-1m", on="2xa100-80gb", global_batch=8)
        cluster = cluster_of(record, "test")
        return amp_inputs(replace(problem, job=replace(problem.job, cluster=cluster)), [1]).forward_s[1][1]

    assert of("unequal") == pytest.approx(1.5 * of(""))
