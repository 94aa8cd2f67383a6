"""Tied embeddings over several stages: who keeps copies, what is reduced, what it costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_plans import make_plan, tiny

from weft.describe.amount import Shape
from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.optimizers import counted_work
from weft.describe.plan import Choice, Plan
from weft.methods.sharding.kinds import GATHER, REDUCE
from weft.methods.tying.kinds import REDUCE_TIED
from weft.moves.layout import build_plan
from weft.planning.compile import compile_plan, pipeline_layout
from weft.planning.planners.bounds import Bounds
from weft.planning.problem import problem_of
from weft.predict.cost.collective_library import SHARE_INSIDE
from weft.predict.cost.memory import SHARDINGS, plan_states, stage_parameters, state_bytes
from weft.predict.cost.placed_plan import CostModel, PlacedPlan
from weft.predict.cost.price import price
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import held_bytes
from weft.predict.predict import predict
from weft.predict.simulator import simulate
from weft.program.kinds import STEP
from weft.program.passes import options_of
from weft.program.verify import require_valid

CONFIG = replace(tiny(tied=True), hidden=256, vocabulary=5003)
TABLE = CONFIG.hidden * CONFIG.vocabulary
GRAPH = layer_graph(CONFIG)
UNTIED = replace(GRAPH, tied=())
CLUSTER = parse_cluster("8xa100-80gb")
SDP4BIT = Choice(name="sdp4bit")


def plan_of(**options: int | str) -> Plan:
    return make_plan(CONFIG, precision="fp32", **options)


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (2, 2), (4, 1)])
def test_only_the_tied_reduction_has_the_table(pp: int, dp: int) -> None:
    plan = plan_of(pp=pp, dp=dp, schedule="1f1b")
    layout = pipeline_layout(plan, GRAPH)
    untied = pipeline_layout(plan, UNTIED)
    [tied] = options_of(plan, GRAPH)["tying"].weights
    assert tied.stages == (0, pp - 1)
    assert tied.gradient_bytes == 4 * TABLE
    saved = [
        before.gradient_bytes - after.gradient_bytes
        for before, after in zip(untied.stages, layout.stages, strict=True)
    ]
    # The table is counted in the embedding; the head never had it.
    assert saved == [4 * TABLE] + [0] * (pp - 1)
    program = compile_plan(plan, GRAPH)
    require_valid(program)
    kinds = program.columns.kind
    assert np.count_nonzero(kinds == REDUCE_TIED) == 2 * dp
    assert np.count_nonzero(kinds == REDUCE) == (pp * dp if dp > 1 else 0)


def test_one_stage_has_no_copy() -> None:
    assert "tying" not in options_of(plan_of(dp=2), GRAPH)
    shape = Shape(2, CONFIG.sequence)
    assert stage_parameters(GRAPH, range(8), shape) == GRAPH.parameters()


@pytest.mark.parametrize("tp", [1, 2])
def test_the_last_stage_holds_a_copy(tp: int) -> None:
    shape = Shape(2, CONFIG.sequence, tp)
    held = [stage_parameters(graph, range(4, 8), shape) for graph in (GRAPH, UNTIED)]
    assert held[0] - held[1] == -(-TABLE // tp)
    held = [stage_parameters(graph, range(4), shape) for graph in (GRAPH, UNTIED)]
    assert held[0] == held[1]


def test_prices_know_the_copy() -> None:
    plan = plan_of(pp=2, schedule="1f1b")
    program = compile_plan(plan, GRAPH)
    costs = price(CostModel(graph=GRAPH, cluster=CLUSTER), program, plan).costs
    columns = program.columns
    reductions = np.flatnonzero(columns.kind == REDUCE_TIED)
    bandwidth_bound = 4 * TABLE / 600e9
    assert (costs.occupancy[reductions] * costs.tick_s > bandwidth_bound).all()
    plain = compile_plan(plan, UNTIED)
    untied = price(CostModel(graph=UNTIED, cluster=CLUSTER), plain, plan).costs
    more = costs.base_bytes - untied.base_bytes
    assert more[0] == 0
    assert more[1] == pytest.approx(TABLE * state_bytes("fp32").total * 1.03, rel=0.01)
    last_step = [
        one.occupancy[np.flatnonzero((made.columns.kind == STEP) & (made.columns.stage == 1))]
        for one, made in ((costs, program), (untied, plain))
    ]
    assert last_step[0] > last_step[1]


def held_of(graph: LayerGraph, plan: Plan) -> dict[str, int]:
    """What the last rank holds all the time, by kind."""
    program = compile_plan(plan, graph)
    placed = PlacedPlan(program=program, plan=plan, model=CostModel(graph=graph, cluster=CLUSTER))
    held = held_bytes(Pricing(program=program, placed=placed))
    parts = {**held["states"].parts, **held["buffers"].parts}
    return {name: int(each[-1]) for name, each in parts.items()} | {
        "whole copies": int(held["whole copies of tied weights"].value[-1])
    }


@pytest.mark.parametrize("sharding", SHARDINGS[1:])
def test_a_copy_shrinks_with_its_replicas(sharding: str) -> None:
    states = state_bytes("fp32")
    sharded = dict(zip(("optimizer_states", "gradients", "weights"), states.in_turn, strict=True))
    for dp in (2, 4):
        plan = plan_of(pp=2, dp=dp, schedule="1f1b").model_copy(update={"sharding": sharding})
        copied, untied = (held_of(graph, plan) for graph in (GRAPH, UNTIED))
        for turn, (name, size) in enumerate(sharded.items()):
            replicas = dp if turn < SHARDINGS.index(sharding) else 1
            # Shares of the whole stage are rounded up.
            assert abs(copied[name] - untied[name] - TABLE * size // replicas) <= size
        assert copied["whole copies"] == 0


@pytest.mark.parametrize("changes", [{"optimizer": counted_work("lamb").work}, {"sync": SDP4BIT}])
def test_copies_stay_whole_where_results_depend_on_borders(changes: dict[str, object]) -> None:
    plan = plan_of(pp=2, dp=2, schedule="1f1b").model_copy(update={"sharding": "zero-3", **changes})
    states = plan_states(plan)
    assert held_of(GRAPH, plan)["whole copies"] == sum(states.in_turn) * (TABLE - TABLE // 2)
    assert options_of(plan, GRAPH)["tying"].weights[0].gradient_bytes == 4 * TABLE


def test_shards_exchange_the_ranges_that_both_own() -> None:
    """The rows have the bytes of the largest shard, and take the time in which they pass the slowest link."""
    plan = plan_of(pp=2, dp=4, schedule="1f1b").model_copy(update={"sharding": "zero-3"})
    program = compile_plan(plan, GRAPH)
    require_valid(program)
    share = max(-(-stage_parameters(GRAPH, one.layers, plan.shape(0)) // 4) for one in plan.stages)
    rows = np.flatnonzero(program.columns.kind == REDUCE_TIED)
    assert set(program.columns.bytes[rows].tolist()) == {4 * min(TABLE, share)}
    assert share < TABLE
    costs = price(CostModel(graph=GRAPH, cluster=CLUSTER), program, plan).costs
    seconds = costs.occupancy[rows] * costs.tick_s
    link = CLUSTER.link_between(0, 4)
    assert seconds == pytest.approx(4 * share / (SHARE_INSIDE * link.bytes_per_s) + link.latency_s, rel=1e-3)
    # Stages reduce and gather their copies themselves.
    for kind, size in ((REDUCE, 4), (GATHER, plan.element_bytes)):
        for stage, one in enumerate(plan.stages):
            mine = (program.columns.kind == kind) & (program.columns.stage == stage)
            count = stage_parameters(GRAPH, one.layers, plan.shape(stage))
            assert set(program.columns.bytes[mine].tolist()) == {size * count}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_all_holders_reduce_at_the_same_time(schedule: str) -> None:
    plan = plan_of(pp=2, dp=2, schedule=schedule)
    program = compile_plan(plan, GRAPH)
    simulated = simulate(program, price(CostModel(graph=GRAPH, cluster=CLUSTER), program, plan).costs)
    assert simulated.steady
    timeline = simulated.timeline
    tied = timeline.kind == REDUCE_TIED
    assert np.count_nonzero(tied) == 4
    assert len(set(timeline.end_ns[tied].tolist())) == 1
    steps = (timeline.kind == STEP) & np.isin(timeline.stage, (0, 1))
    assert timeline.start_ns[steps].min() >= timeline.end_ns[tied].max()


@pytest.mark.parametrize(
    ("pp", "dp", "sharding"),
    [(1, 2, "zero-0"), (4, 2, "zero-0"), (4, 2, "zero-1"), (4, 2, "zero-3")],
)
def test_bounds_stay_below_what_the_simulator_finds(pp: int, dp: int, sharding: str) -> None:
    problem = problem_of(model="gpt2", on="8xa100-80gb", global_batch=16)
    assert problem.job.graph.tied
    bounds = Bounds(problem)
    layout = Layout(
        pp=pp,
        dp=dp,
        loops=1,
        micro_batch_size=1,
        schedule="1f1b",
        sharding=sharding,
    )
    plan = build_plan(problem.job, layout, bounds.layer_seconds(layout))
    program = compile_plan(plan, problem.job.graph)
    require_valid(program)
    prediction = predict(
        CostModel(graph=problem.job.graph, cluster=problem.job.cluster), plan, program
    ).prediction
    assert prediction is not None
    assert bounds.holding(layout).total <= max(prediction.peak_bytes) * (1 + 1e-4)
    assert bounds.step_s(layout) <= prediction.step_s * (1 + 1e-6)
    if pp == 1:
        assert bounds.holding(layout).total == pytest.approx(max(prediction.peak_bytes), rel=1e-4)
