"""The planner of stages that form a graph: the better of a graph and a chain, told in words."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from weft.describe.cluster import Link
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import PartialLayout
from weft.describe.plan import Choice
from weft.describe.plan_file import check_plan
from weft.errors import InputError
from weft.planning.compile import compile_plan, pipeline_layout
from weft.planning.planners import Candidate, Ranking, get_planner
from weft.planning.planners.graphpipe.planner import GraphPipePlanner
from weft.planning.planners.layer_times import ProblemLayerTimes
from weft.planning.problem import Problem, problem_of
from weft.program.schedules.graph_1f1b import samples_in_flight
from weft.program.verify import verify
from weft.timeline.figures import peak_in_flight


def towers(turns: bool = True, **pins: object) -> Problem:
    """Four towers of three blocks, layer after layer of all towers or tower after tower."""
    problem = problem_of(
        model="bert-base",
        on="8xa100-40gb",
        global_batch=64,
        pins=PartialLayout(**pins),  # type: ignore[arg-type]
    )
    graph = problem.job.graph
    block = graph.layers[1]
    names = [(tower, depth) for tower in range(4) for depth in range(3)]
    if turns:
        names.sort(key=lambda name: name[1])
    place = {name: 1 + index for index, name in enumerate(names)}
    blocks = (replace(block, name=f"tower.{tower}.{depth}") for tower, depth in names)
    edges = [(0, place[tower, 0]) for tower in range(4)]
    edges += [(place[tower, depth], place[tower, depth + 1]) for tower in range(4) for depth in range(2)]
    edges += [(place[tower, 2], 13) for tower in range(4)]
    joined = LayerGraph(
        name="towers",
        layers=(graph.layers[0], *blocks, graph.layers[-1]),
        edges=tuple(sorted(edges)),
        sequence=graph.sequence,
        vocabulary=graph.vocabulary,
    )
    return replace(problem, job=replace(problem.job, graph=joined))


@cache
def searched(name: str, turns: bool = True) -> Ranking:
    """What a planner answers for towers on single replicas."""
    return get_planner(name).search(towers(turns, dp=1, recompute="none", sharding="zero-0"))


def ordered(schedule: str) -> Candidate:
    """The best plan of towers in an order."""
    fitting = searched("graphpipe").fitting
    return next(one for one in fitting if one.plan and one.plan.schedule.name == schedule)


def test_stages_take_layers_that_do_not_follow_each_other() -> None:
    problem, best = towers(), ordered("graph-1f1b")
    assert best.plan is not None
    assert best.layout is None
    assert check_plan(best.plan, problem.job.graph, problem.job.cluster) == []
    program = compile_plan(best.plan, problem.job.graph)
    assert verify(program) == []
    edges, count = pipeline_layout(best.plan, problem.job.graph).edges, len(best.plan.stages)
    kept = samples_in_flight(edges, [1] * count, [1] * count, best.plan.micro_batches)
    assert tuple(peak_in_flight(program)) == kept
    assert kept[0] < count


def test_split_backwards_shorten_the_step_of_a_graph() -> None:
    split, whole, problem = ordered("graph-zb-h1"), ordered("graph-1f1b"), towers()
    assert split.step_s < whole.step_s
    assert split.plan is not None
    assert verify(compile_plan(split.plan, problem.job.graph)) == []


def test_stages_keep_whole_backwards_where_the_simulator_finds_them_faster() -> None:
    pins = PartialLayout(sharding="zero-0", dp=1, recompute="none")
    problem = problem_of(model="dlrm", on="4xv100-16gb", global_batch=64, precision="fp32", pins=pins)
    best = get_planner("graphpipe").search(problem).fitting[0]
    assert best.plan is not None
    assert best.plan.schedule.options["whole"]
    assert "whole" in best.words
    every = best.plan.model_copy(update={"schedule": Choice(name="graph-zb-h1")})
    assert best.step_s < problem.step_of(every).prediction.step_s


def test_states_of_one_replica_are_not_divided() -> None:
    pins = PartialLayout(dp=1)
    problem = problem_of(model="dlrm", on="4xv100-16gb", global_batch=64, precision="fp32", pins=pins)
    planner = GraphPipePlanner(orders=(("graph-zb-h1", "zero-0"), ("graph-zb-h1", "zero-1")))
    plans = [one.plan for one in planner.search(problem).fitting if one.plan is not None]
    assert {"graph-1f1b", "graph-zb-h1"} <= {plan.schedule.name for plan in plans}
    assert {plan.sharding for plan in plans} == {"zero-0"}


def test_the_best_plan_says_what_it_won_against() -> None:
    ranking = searched("graphpipe")
    # Without those that run stages of a graph as a row.
    rows = [one for one in ranking.fitting if one.layout is not None and one.layout.schedule == "1f1b"]
    assert "a graph of " in ranking.fitting[0].reason
    assert "the best plan with stages in a row takes " in ranking.fitting[0].reason
    assert rows
    assert ranking.fitting[0].step_s < rows[0].step_s


def test_the_order_of_layers_does_not_decide_the_partition() -> None:
    one, other = (searched("graphpipe", turns).fitting[0] for turns in (True, False))
    assert one.step_s == pytest.approx(other.step_s, rel=1e-6)


def test_the_default_planner_is_never_worse() -> None:
    default, graphs = (searched(name).fitting[0] for name in ("weft", "graphpipe"))
    assert default.step_s <= graphs.step_s
    assert graphs.plan in [one.plan for one in searched("weft").candidates]


def test_a_chain_is_planned_as_a_chain() -> None:
    problem = problem_of(model="gpt-1m", on="4xa100-40gb", global_batch=16)
    for one in get_planner("graphpipe").search(problem).fitting:
        assert one.layout is not None
        assert one.layout.schedule in ("1f1b", "zb-h1")


@pytest.mark.parametrize(
    ("pins", "reason"),
    [
        ({"loops": 2}, "plan.loops: graphpipe cannot keep it: each device has one stage (nearest valid: 1)"),
        ({"splits": (1, 2)}, "plan.splits: graphpipe cannot keep it: stages do not split micro-batches"),
    ],
)
def test_pins_that_it_cannot_keep_are_refused(pins: dict[str, object], reason: str) -> None:
    with pytest.raises(InputError) as caught:
        get_planner("graphpipe").search(towers(**pins))  # type: ignore[arg-type]
    assert reason in str(caught.value.violations[0])


@pytest.mark.parametrize(
    ("pins", "reason"),
    [
        ({"micro_batch_size": 24}, "micro-batch size 24 = 24; nearest global batch: 72"),
        ({"dp": 3}, "is not a multiple of dp 3 x micro-batch size 1 = 3; nearest global batch: 63"),
        ({"tp": 2}, "tp 2: no layer of the model can be divided over tensor ranks"),
        ({"schedule": "zb-v"}, "zb-v"),
    ],
)
def test_what_cannot_be_is_refused_and_says_why(pins: dict[str, object], reason: str) -> None:
    ranking = get_planner("graphpipe").search(towers(**pins))  # type: ignore[arg-type]
    assert ranking.fitting == []
    assert reason in ranking.candidates[0].reason


@pytest.mark.parametrize("pp", [2, 3])
def test_plans_have_as_many_stages_as_pinned(pp: int) -> None:
    found = get_planner("graphpipe").search(towers(pp=pp, recompute="none", sharding="zero-0")).fitting
    assert {len(one.plan.stages) for one in found if one.plan is not None} == {pp}


@pytest.mark.parametrize(
    ("name", "schedule", "size"), [("graphpipe", "graph-1f1b", 128), ("pipedream", "1f1b", 64)]
)
def test_stages_have_numbers_of_replicas_of_their_own_where_that_is_faster(
    name: str, schedule: str, size: int
) -> None:
    pins = PartialLayout(sharding="zero-0", micro_batch_size=size, recompute="none", schedule=schedule)
    problem = problem_of(model="candle-uno", on="8xv100-16gb", global_batch=512, precision="fp32", pins=pins)
    fitting = get_planner(name).search(problem).fitting
    best, alike = fitting[0], next(one for one in fitting if one.plan and len(set(one.plan.replicas)) == 1)
    assert best.plan is not None
    assert len(set(best.plan.replicas)) > 1
    assert best.step_s < alike.step_s
    assert best.layout is None
    assert f"replicas {'+'.join(map(str, best.plan.replicas))}" in best.reason
    assert check_plan(best.plan, problem.job.graph, problem.job.cluster) == []
    assert verify(compile_plan(best.plan, problem.job.graph)) == []
    # Replicas are neighbours, and those of stages with more of them come first.
    for stage in best.plan.stages:
        (first,), count = stage.replicas[0].ranks, len(stage.replicas)
        assert [copy.ranks for copy in stage.replicas] == [(first + one,) for one in range(count)]
        assert first % count == 0


def test_pinned_replicas_are_those_of_all_stages() -> None:
    pins = PartialLayout(sharding="zero-0", micro_batch_size=32, dp=2)
    problem = problem_of(model="candle-uno", on="8xv100-16gb", global_batch=512, precision="fp32", pins=pins)
    for one in get_planner("pipedream").search(problem).fitting:
        assert one.plan is not None
        assert set(one.plan.replicas) == {2}


def on_unlike(model: str, on: str, most_kinds: int = 3, **pins: object) -> Ranking:
    decided = PartialLayout(**pins)  # type: ignore[arg-type]
    problem = problem_of(model=model, on=on, global_batch=64, precision="fp32", pins=decided)
    return GraphPipePlanner(most_kinds=most_kinds).search(problem)


def test_stages_with_most_work_are_on_the_fastest_devices() -> None:
    ranking = on_unlike("candle-uno", "4xv100-16gb+2xa100-40gb", dp=1)
    plan, cluster = ranking.fitting[0].plan, ranking.problem.job.cluster
    assert plan is not None
    assert check_plan(plan, ranking.problem.job.graph, cluster) == []
    assert verify(compile_plan(plan, ranking.problem.job.graph)) == []
    layers = ProblemLayerTimes(ranking.problem).of_group(0, plan.micro_batch_size, 1).both_s
    work_s: dict[str, list[float]] = {}
    for stage in plan.stages:
        device = cluster.device_of(stage.replicas[0].ranks[0]).name
        work_s.setdefault(device, []).append(float(layers[list(stage.layers)].sum()))
    assert min(work_s["a100-40gb"]) >= max(work_s["v100-16gb"])


def test_slow_devices_are_left_out_where_that_is_faster() -> None:
    problem = problem_of(model="dlrm", on="2xa100-40gb+1xt4", global_batch=64, precision="fp32")
    cluster = problem.job.cluster
    slow = replace(cluster, links=dict.fromkeys(cluster.links, Link(bytes_per_s=3e8, latency_s=5e-6)))
    ranking = get_planner("graphpipe").search(replace(problem, job=replace(problem.job, cluster=slow)))
    best = ranking.fitting[0]
    assert best.plan is not None
    assert best.plan.ranks == 2
    assert best.plan.cluster == ranking.problem.job.cluster.name
    others = [one for one in ranking.fitting if one.plan is not None and one.plan.ranks == 3]
    assert others
    assert best.step_s < others[0].step_s
    # Pins that need all devices are kept.
    pinned = on_unlike("dlrm", "2xa100-40gb+4xt4", pp=6, dp=1).fitting[0]
    assert pinned.plan is not None
    assert pinned.plan.ranks == 6


def test_layers_move_to_fast_devices_where_that_is_faster() -> None:
    """Two A100 alone take 40 ms, and six stages of equal work on the slowest devices longer.

    The search that tells kinds of devices apart hardly needs such moves, so it is left out.
    """
    ranking = on_unlike("dlrm", "2xa100-40gb+4xt4", most_kinds=1)
    alone = [one for one in ranking.fitting if one.plan is not None and one.plan.ranks == 2]
    best = ranking.fitting[0]
    assert best.plan is not None
    assert best.plan.ranks == 6
    assert best.step_s < 0.85 * alone[0].step_s


@pytest.mark.parametrize("pins", [{"tp": 4}, {"dp": 4}])
def test_pinned_degrees_that_a_part_has_no_room_for_are_kept_on_all_devices(pins: dict[str, int]) -> None:
    decided = PartialLayout(**pins)  # type: ignore[arg-type]
    problem = problem_of(model="gpt2", on="2xa100-40gb+4xt4+2xt4", global_batch=48, pins=decided)
    for candidate in get_planner("graphpipe").search(problem).fitting:
        assert candidate.plan is not None
        assert candidate.plan.ranks >= 4
        assert {
            "tp": candidate.plan.tensor_degrees[0],
            "dp": candidate.plan.replicas[0],
        }.items() >= pins.items()
