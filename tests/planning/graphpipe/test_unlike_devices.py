"""Layers that move between stages on unlike devices: edges still lead on, and stages get more level."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.plan import Plan
from weft.describe.plan_file import check_plan
from weft.planning.compile import compile_plan
from weft.planning.planners.graphpipe.part_plans import StageGraph, StageOfLayers
from weft.planning.planners.graphpipe.plans import plan_of
from weft.planning.planners.graphpipe.unlike_devices import by_work, levelled, moves
from weft.planning.planners.layer_times import ProblemLayerTimes
from weft.planning.problem import Problem, problem_of
from weft.program.verify import verify

PROBLEMS = {
    model: problem_of(model=model, on="2xa100-40gb+2xt4", global_batch=16)
    for model in ("gpt2", "dlrm", "two-branch")
}


def cut(problem: Problem, borders: Iterable[int]) -> Plan:
    """Stages of layers in a row: the first two on fast devices, others on slow ones."""
    ends = [0, *sorted(borders), len(problem.job.graph.layers)]
    stages = tuple(StageOfLayers(tuple(range(*each)), 1, "none", 1) for each in pairwise(ends))
    graph = StageGraph(stages=stages, micro_batch_size=1, sample_s=1.0, in_flight=len(stages))
    return plan_of(problem, graph, tp=1, sharding="zero-0")


@st.composite
def placed(draw: st.DrawFn) -> tuple[Problem, Plan]:
    problem = PROBLEMS[draw(st.sampled_from(sorted(PROBLEMS)))]
    inner = st.integers(1, len(problem.job.graph.layers) - 1)
    return problem, cut(problem, draw(st.sets(inner, min_size=3, max_size=3)))


def stage_seconds(problem: Problem, plan: Plan) -> list[float]:
    times, group_of = ProblemLayerTimes(problem), problem.cost_model.network.places.group
    found = []
    for stage in plan.stages:
        group = int(group_of[stage.replicas[0].ranks[0]])
        found.append(float(times.of_group(group, 1, 1).both_s[list(stage.layers)].sum()))
    return found


@given(st.data())
def test_every_move_alone_leaves_all_edges_leading_on(data: st.DataObject) -> None:
    layers = data.draw(st.integers(2, 8))
    pairs = [(one, other) for other in range(layers) for one in range(other)]
    edges = np.array(sorted(data.draw(st.sets(st.sampled_from(pairs), min_size=1))))
    stage_of = np.array(data.draw(st.lists(st.integers(0, 3), min_size=layers, max_size=layers)))
    for one, other in edges.tolist():
        stage_of[other] = max(stage_of[one], stage_of[other])
    layer, target = moves(stage_of, edges, 4)
    assert (target != stage_of[layer]).all()
    for one, new in zip(layer.tolist(), target.tolist(), strict=True):
        moved = stage_of.copy()
        moved[one] = new
        assert (moved[edges[:, 0]] <= moved[edges[:, 1]]).all()
    # A layer at the border of two stages moves over it where nothing else of its stage is in the way.
    crossing = edges[stage_of[edges[:, 0]] < stage_of[edges[:, 1]]]
    free = [
        end
        for end in crossing[:, 1].tolist()
        if (stage_of[edges[edges[:, 1] == end, 0]] < stage_of[end]).all()
    ]
    assert {*free} <= {*layer.tolist()}


@given(placed())
def test_layers_move_along_edges_and_the_slowest_stage_gets_no_slower(case: tuple[Problem, Plan]) -> None:
    problem, plan = case
    moved = levelled(problem, plan)
    graph = problem.job.graph
    stage_of = np.zeros(len(graph.layers), dtype=np.int64)
    for index, stage in enumerate(moved.stages):
        stage_of[list(stage.layers)] = index
    assert sorted(layer for stage in moved.stages for layer in stage.layers) == [*range(len(graph.layers))]
    assert all(stage.layers for stage in moved.stages)
    assert all(stage_of[producer] <= stage_of[consumer] for producer, consumer in graph.edges)
    assert max(stage_seconds(problem, moved)) <= max(stage_seconds(problem, plan)) * (1 + 1e-9)
    assert levelled(problem, moved) == moved
    assert [stage.replicas for stage in moved.stages] == [stage.replicas for stage in plan.stages]
    assert check_plan(moved, graph, problem.job.cluster) == []
    assert verify(compile_plan(moved, graph)) == []


def test_stages_of_a_chain_are_nearly_as_level_as_they_can_be() -> None:
    problem = problem_of(model="llama-7b", on="2xa100-40gb+2xt4", global_batch=16)
    times = ProblemLayerTimes(problem)
    fast, slow = (times.of_group(group, 1, 1).both_s for group in range(2))
    best = min(
        max(fast[:a].sum(), fast[a:b].sum(), slow[b:c].sum(), slow[c:].sum())
        for a, b, c in combinations(range(1, len(fast)), 3)
    )
    for borders in [(8, 17, 25), (1, 2, 3), (31, 32, 33), (2, 17, 32)]:
        plan = cut(problem, borders)
        assert max(stage_seconds(problem, plan)) > 1.5 * best
        assert max(stage_seconds(problem, levelled(problem, plan))) < 1.1 * best


@pytest.mark.parametrize("model", sorted(PROBLEMS))
def test_one_stage_keeps_all_layers(model: str) -> None:
    plan = cut(PROBLEMS[model], [])
    assert levelled(PROBLEMS[model], plan) == plan


def test_stages_with_most_work_get_the_fastest_devices() -> None:
    problem = PROBLEMS["gpt2"]
    dealt = by_work(problem, cut(problem, (1, 2, 8)))
    fast = [index for index, stage in enumerate(dealt.stages) if stage.replicas[0].ranks[0] < 2]
    assert fast == [2, 3]
