"""Partitions with devices of one kind in each stage: legal, the best cuts of chains, beside all others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from graphpipe_graphs import Graph, found_by, is_acyclic, partitioner, plain_costs, trees
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from weft.describe.plan_file import check_plan
from weft.planning.compile import compile_plan
from weft.planning.planners.graph_costs import GraphCosts
from weft.planning.planners.graphpipe.part_plans import StageGraph, StageOfLayers, is_within, packed
from weft.planning.planners.graphpipe.planner import GraphPipePlanner
from weft.planning.planners.graphpipe.plans import plan_of
from weft.planning.planners.part_clusters import kinds_of
from weft.planning.problem import Problem, problem_of
from weft.program.verify import verify

SECONDS = st.lists(st.sampled_from([1.0, 2.0, 3.0, 5.0]), min_size=10, max_size=10)
# Devices of each kind, and how many times slower than the first they are.
KINDS = st.lists(st.tuples(st.integers(1, 3), st.sampled_from([1.0, 1.5, 4.0])), min_size=2, max_size=3)
CLUSTERS = ("1xa100-40gb+2xt4", "2xt4+1xa100-40gb", "1xa100-40gb+1xv100-16gb+1xt4")


def costs_of(
    graph: Graph, seconds: list[float], kinds: list[tuple[int, float]], memory: float = 40.0
) -> list[GraphCosts]:
    """The costs of each kind. Devices have memory for fewer layers, the slower they are."""
    works = seconds[: graph[0]]
    return [
        plain_costs(
            graph[1],
            [slower * work for work in works],
            devices=devices,
            memory_bytes=memory / slower,
            sent_bytes=0.5,
        )
        for devices, slower in kinds
    ]


def stage_s(costs: GraphCosts, layers: range | tuple[int, ...], size: int) -> float:
    return costs.sample_s(costs.stage(layers, size, 1), size, 1)


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=1, max_size=4))
def test_packed_numbers_of_devices_compare_kind_by_kind(counts: list[tuple[int, int, int, int]]) -> None:
    for one, other in product([each[:3] for each in counts], repeat=2):
        packs = [sum(packed(kind, count) for kind, count in enumerate(each)) for each in (one, other)]
        assert is_within(*packs) == all(map(int.__le__, one, other))


@given(trees(), SECONDS, KINDS, st.sampled_from([4.0, 10.0, 40.0]))
def test_partitions_are_legal(
    graph: Graph, seconds: list[float], kinds: list[tuple[int, float]], memory: float
) -> None:
    costs = costs_of(graph, seconds, kinds, memory)
    found = partitioner(*costs, size=1).search()
    if found is None:
        return
    layers = [stage.layers for stage in found.stages]
    assert sorted(layer for stage in layers for layer in stage) == list(range(graph[0]))
    assert is_acyclic(graph[1], layers)
    used = Counter(stage.kind for stage in found.stages)
    assert all(used[kind] <= one.devices for kind, one in enumerate(costs))
    for stage in found.stages:
        assert stage.in_flight * len(stage.layers) <= costs[stage.kind].memory_bytes
    assert found.sample_s == max(stage_s(costs[one.kind], one.layers, 1) for one in found.stages)


def test_a_stage_fits_the_memory_of_its_kind() -> None:
    large, small = (
        plain_costs([(0, 1), (1, 2), (2, 3)], [1.0] * 4, devices=1, memory_bytes=size) for size in (100, 1)
    )
    found = found_by(partitioner(large, small, size=1))
    assert {stage.kind: stage.layers for stage in found.stages} == {0: (0, 1, 2), 1: (3,)}


@given(st.integers(1, 8), SECONDS, KINDS)
def test_a_chain_has_the_best_cuts_and_kinds(
    count: int, seconds: list[float], kinds: list[tuple[int, float]]
) -> None:
    chain = (count, [(one, one + 1) for one in range(count - 1)])
    costs = [replace(one, memory_bytes=float("inf")) for one in costs_of(chain, seconds, kinds)]
    least = {(0, *(0 for _ in costs)): 0.0}
    for end in range(1, count + 1):
        for used in product(*(range(one.devices + 1) for one in costs)):
            for start, kind in product(range(end), range(len(costs))):
                before = tuple(each - (index == kind) for index, each in enumerate(used))
                if (start, *before) in least:
                    cut = max(least[start, *before], stage_s(costs[kind], range(start, end), 4))
                    least[end, *used] = min(least.get((end, *used), cut), cut)
    best = min(value for (end, *_), value in least.items() if end == count)
    assert found_by(partitioner(*costs)).sample_s == pytest.approx(best)


@given(trees(8), SECONDS, KINDS)
def test_kinds_are_never_slower_than_the_slowest_of_them(
    graph: Graph, seconds: list[float], kinds: list[tuple[int, float]]
) -> None:
    costs = costs_of(graph, seconds, kinds)
    slowest = max(slower for _, slower in kinds)
    (alike,) = costs_of(graph, seconds, [(sum(devices for devices, _ in kinds), slowest)])
    found = partitioner(alike, size=1).search(tolerance=1e-9)
    assume(found is not None)
    assert found is not None
    assert found_by(partitioner(*costs, size=1)).sample_s <= found.sample_s * (1 + 1e-6)
    # Kinds that are alike are one kind.
    same = costs_of(graph, seconds, [(devices, slowest) for devices, _ in kinds])
    assert found_by(partitioner(*same, size=1)).sample_s == pytest.approx(found.sample_s)


def with_edges(problem: Problem, graph: Graph) -> Problem:
    """The problem with a block for each layer of a graph, between the first and the last layer of its own."""
    count, edges = graph
    first, block, *_, last = problem.job.graph.layers
    inner = [(one + 1, other + 1) for one, other in edges]
    ends = [(0, layer) for layer in {*range(1, count + 1)} - {other for _, other in inner}]
    ends += [(layer, count + 1) for layer in {*range(1, count + 1)} - {one for one, _ in inner}]
    blocks = (replace(block, name=f"block.{index}") for index in range(count))
    made = replace(
        problem.job.graph, layers=(first, *blocks, last), edges=tuple(sorted([*inner, *ends])), tied=()
    )
    return replace(problem, job=replace(problem.job, graph=made))


@settings(max_examples=12)
@given(trees(5), st.sampled_from(CLUSTERS))
def test_a_search_by_kinds_keeps_all_other_plans(graph: Graph, on: str) -> None:
    problem = with_edges(problem_of(model="bert-base", on=on, global_batch=8, precision="fp32"), graph)
    before, after = (GraphPipePlanner(most_kinds=most).search(problem) for most in (1, 3))
    plans = {one.plan.plan_id for one in after.candidates if one.plan}
    assert {one.plan.plan_id for one in before.candidates if one.plan} <= plans
    assert after.fitting[0].step_s <= before.fitting[0].step_s
    for one in after.fitting:
        assert one.plan is not None
        assert check_plan(one.plan, problem.job.graph, problem.job.cluster) == []
        assert verify(compile_plan(one.plan, problem.job.graph)) == []


def test_stages_lie_on_the_devices_of_their_kind() -> None:
    problem = problem_of(model="dlrm", on="4xa100-40gb+2xt4", global_batch=16)
    layers = len(problem.job.graph.layers)
    stages = (
        StageOfLayers(tuple(range(8)), 2, "none", 1, kind=1),
        StageOfLayers(tuple(range(8, 20)), 2, "none", 1, kind=0),
        StageOfLayers(tuple(range(20, layers)), 2, "none", 1, kind=0),
    )
    graph = StageGraph(stages=stages, micro_batch_size=1, sample_s=1.0, in_flight=1)
    plan = plan_of(problem, graph, tp=1, sharding="zero-0", in_a_row=True)
    ranks = [[copy.ranks for copy in stage.replicas] for stage in plan.stages]
    assert ranks == [[(4,), (5,)], [(0,), (1,)], [(2,), (3,)]]
    assert check_plan(plan, problem.job.graph, problem.job.cluster) == []


def test_neighbouring_groups_of_equal_devices_are_one_kind() -> None:
    problem = problem_of(model="gpt2", on="2xa100-40gb+4xt4+2xt4+1xa100-40gb", global_batch=16)
    kinds = [one.job.cluster for one in kinds_of(problem)]
    assert [cluster.ranks for cluster in kinds] == [2, 6, 1]
    assert [{group.device.name for group in cluster.groups} for cluster in kinds] == [
        {"a100-40gb"},
        {"t4"},
        {"a100-40gb"},
    ]


@pytest.mark.parametrize("model", ["dlrm", "candle-uno"])
def test_kinds_make_steps_shorter(model: str) -> None:
    problem = problem_of(model=model, on="2xa100-40gb+4xt4", global_batch=64, precision="fp32")
    before, after = (GraphPipePlanner(most_kinds=most).search(problem) for most in (1, 3))
    assert before.fitting[0].step_s > 1.25 * after.fitting[0].step_s
    assert before.fitting[0].plan in [one.plan for one in after.fitting]
