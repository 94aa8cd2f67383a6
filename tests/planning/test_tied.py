"""Tied embeddings over several stages: who keeps copies, what is reduced, what it costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_plans import make_plan, tiny

from weft.describe.amount import Shape
from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.layout import Layout
from weft.describe.plan import Plan
from weft.methods.sharding.kinds import REDUCE
from weft.methods.tying.kinds import REDUCE_TIED
from weft.moves.layout import build_plan
from weft.planning.compile import compile_plan, pipeline_layout
from weft.planning.planners.bounds import Bounds
from weft.planning.problem import problem_of
from weft.predict.cost.memory import stage_parameters, state_bytes
from weft.predict.cost.placed_plan import CostModel
from weft.predict.cost.price import price
from weft.predict.predict import predict
from weft.predict.simulator import simulate
from weft.program.kinds import STEP
from weft.program.passes import options_of
from weft.program.verify import require_valid

CONFIG = replace(tiny(tied=True), hidden=256, vocabulary=5003)
TABLE = CONFIG.hidden * CONFIG.vocabulary
GRAPH = layer_graph(CONFIG)
UNTIED = replace(GRAPH, tied=())


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
    cluster = parse_cluster("8xa100-80gb")
    plan = plan_of(pp=2, schedule="1f1b")
    program = compile_plan(plan, GRAPH)
    costs = price(CostModel(graph=GRAPH, cluster=cluster), program, plan).costs
    columns = program.columns
    reductions = np.flatnonzero(columns.kind == REDUCE_TIED)
    bandwidth_bound = 4 * TABLE / 600e9
    assert (costs.occupancy[reductions] * costs.tick_s > bandwidth_bound).all()
    plain = compile_plan(plan, UNTIED)
    untied = price(CostModel(graph=UNTIED, cluster=cluster), plain, plan).costs
    more = costs.base_bytes - untied.base_bytes
    assert more[0] == 0
    assert more[1] == pytest.approx(TABLE * state_bytes("fp32").total * 1.03, rel=0.01)
    last_step = [
        one.occupancy[np.flatnonzero((made.columns.kind == STEP) & (made.columns.stage == 1))]
        for one, made in ((costs, program), (untied, plain))
    ]
    assert last_step[0] > last_step[1]


def test_copies_are_whole_at_every_level() -> None:
    whole = plan_of(pp=2, dp=2, schedule="1f1b")
    cluster = parse_cluster("8xa100-80gb")
    states = state_bytes("fp32")
    for sharding, shared in (("zero-1", states.optimizer), ("zero-2", states.optimizer + states.gradients)):
        plan = whole.model_copy(update={"sharding": sharding})
        bases = [
            price(CostModel(graph=graph, cluster=cluster), compile_plan(plan, graph), plan).costs.base_bytes
            for graph in (GRAPH, UNTIED)
        ]
        more = (bases[0] - bases[1])[:2]
        # The first stage's table has no share any more; the last one's is a copy that it did not have.
        assert more[0] == pytest.approx(1.03 * TABLE / 2 * shared, rel=0.01)
        assert more[1] > 1.03 * TABLE * states.total


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_all_holders_reduce_at_the_same_time(schedule: str) -> None:
    plan = plan_of(pp=2, dp=2, schedule=schedule)
    program = compile_plan(plan, GRAPH)
    simulated = simulate(
        program, price(CostModel(graph=GRAPH, cluster=parse_cluster("8xa100-80gb")), program, plan).costs
    )
    assert simulated.steady
    timeline = simulated.timeline
    tied = timeline.kind == REDUCE_TIED
    assert np.count_nonzero(tied) == 4
    assert len(set(timeline.end_ns[tied].tolist())) == 1
    steps = (timeline.kind == STEP) & np.isin(timeline.stage, (0, 1))
    assert timeline.start_ns[steps].min() >= timeline.end_ns[tied].max()


@pytest.mark.parametrize(("pp", "dp", "sharding"), [(1, 2, "zero-0"), (4, 2, "zero-0"), (4, 2, "zero-1")])
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
