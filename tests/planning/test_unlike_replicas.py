"""Plans whose replicas of one stage have unlike tensor degrees: checked, priced, and honest about memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_plans import divisible, make_plan

import weft
from weft.cli.tables.answer import plain_words
from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.plan import Plan
from weft.describe.plan_file import check_plan
from weft.planning.compile import compile_evaluation, compile_folded, compile_part, compile_plan
from weft.planning.planned_job import PlannedJob
from weft.planning.planners.base import Candidate, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.simulated import judged
from weft.planning.planners.weft.unlike_replicas import ReplicaSpace
from weft.planning.planners.weft.unlike_space import in_orders
from weft.planning.problem import Problem, problem_of
from weft.predict.cost.memory import gradient_element_bytes, stage_parameters
from weft.predict.cost.placed_plan import CostModel, PlacedPlan
from weft.predict.cost.price import price_placed
from weft.predict.predict import predict
from weft.predict.simulator import simulate
from weft.program.kinds import KINDS
from weft.program.rank_program import digests
from weft.program.verify import verify

MODEL = replace(divisible("llama", heads=8, sequence=64), layers=4, hidden=64, key_value_heads=8)
GRAPH = layer_graph(MODEL)
REDUCE = KINDS.code("reduce")
# As many devices as the largest plan has ranks.
CLUSTER = parse_cluster("24xa100-80gb")
COSTS = CostModel(graph=GRAPH, cluster=CLUSTER)


def planned(*unlike: tuple[int, ...], micro_batches: int = 4) -> Plan:
    """`unlike` has the tensor ranks of each stage, by pipeline."""
    plan = make_plan(
        MODEL,
        schedule="1f1b",
        pp=len(unlike[0]),
        dp=len(unlike),
        micro_batches=micro_batches,
        precision="fp32",
        unlike=unlike,
    )
    return plan.model_copy(update={"cluster": CLUSTER.name, "cluster_fingerprint": CLUSTER.fingerprint})


@st.composite
def unlike_plans(draw: st.DrawFn) -> Plan:
    stages, pipelines = draw(st.integers(1, 2)), draw(st.integers(2, 3))
    each = st.tuples(*[st.sampled_from((1, 2, 4))] * stages)
    unlike = draw(
        st.lists(each, min_size=pipelines, max_size=pipelines).filter(lambda one: len(set(one)) > 1)
    )
    return planned(*unlike)


@settings(max_examples=10)
@given(plan=unlike_plans())
def test_every_plan_is_valid_and_simulated_in_order(plan: Plan) -> None:
    assert check_plan(plan, GRAPH, CLUSTER) == []
    program = compile_plan(plan, GRAPH)
    assert verify(program) == verify(compile_evaluation(plan, GRAPH)) == []
    assert [compile_part(plan, GRAPH, rank).digest for rank in range(plan.ranks)] == digests(program).tolist()
    assert len(compile_folded(plan, GRAPH, CLUSTER)) == len(program)
    placed = PlacedPlan(program=program, plan=plan, model=COSTS)
    costs = price_placed(placed, program).costs
    timeline = simulate(program, replace(costs, lead=None, rest=None)).timeline
    start, end = (np.empty(len(program), dtype=np.int64) for _ in range(2))
    start[timeline.position], end[timeline.position] = timeline.start_ns, timeline.end_ns
    now = program.edges.distance == 0
    assert (end[program.edges.source[now]] <= start[program.edges.target[now]]).all()


@settings(max_examples=10)
@given(plan=unlike_plans())
def test_a_rank_sends_a_shard_of_the_widest_replica_for_each_that_it_holds(plan: Plan) -> None:
    """In a replica of n ranks beside one of w, a rank holds w / n shards."""
    columns = compile_plan(plan, GRAPH).columns
    for index, stage in enumerate(plan.stages):
        degrees = plan.replica_degrees[index]
        widest = degrees.index(max(degrees))
        shard_bytes = gradient_element_bytes(plan) * stage_parameters(
            GRAPH, stage.layers, plan.shape(index, widest)
        )
        for copy, degree in zip(stage.replicas, degrees, strict=True):
            for rank in copy.ranks:
                rows = (columns.kind == REDUCE) & (columns.stage == index) & (columns.rank == rank)
                assert columns.bytes[rows].sum() == max(degrees) // degree * shard_bytes


@settings(max_examples=10)
@given(plan=unlike_plans())
def test_more_tensor_ranks_never_hold_more_bytes(plan: Plan) -> None:
    peaks = predict(COSTS, plan, compile_plan(plan, GRAPH)).prediction.peak_bytes
    for stage, degrees in zip(plan.stages, plan.replica_degrees, strict=True):
        pairs = sorted(
            zip(degrees, (max(peaks[rank] for rank in one.ranks) for one in stage.replicas), strict=True)
        )
        for (few, most), (more, less) in pairwise(pairs):
            assert few == more or less <= most


def test_a_rank_holds_as_many_bytes_as_in_a_plan_of_its_degree() -> None:
    def peaks(*unlike: tuple[int, ...]) -> tuple[int, ...]:
        plan = planned(*unlike)
        return predict(COSTS, plan, compile_plan(plan, GRAPH)).prediction.peak_bytes

    mixed, wide, narrow = peaks((4,), (1,)), peaks((4,), (4,)), peaks((1,), (1,))
    assert mixed[:4] == wide[:4]
    # It has room for two shards of the four in place of a whole arriving gradient.
    assert mixed[4] < narrow[0]


def test_a_computation_takes_the_time_of_its_own_degree() -> None:
    def forward_s(*unlike: tuple[int, ...]) -> list[float]:
        plan = planned(*unlike)
        program = compile_plan(plan, GRAPH)
        placed = PlacedPlan(program=program, plan=plan, model=COSTS)
        taken = price_placed(placed, program).costs.occupancy
        mine = program.columns.kind == KINDS.code("forward")
        return [int(taken[mine & (program.columns.rank == rank)][0]) for rank in range(plan.ranks)]

    mixed = forward_s((4,), (2,), (1,))
    assert mixed == [*forward_s((4,), (4,))[:4], *forward_s((2,), (2,))[:2], forward_s((1,), (1,))[0]]


def test_a_plan_says_the_degrees_of_its_replicas() -> None:
    plan = planned((4, 2), (2, 2))
    assert plan.words == "pp 2 x dp 2, 1f1b, 2 stages, micro-batch size 2, tensor ranks 4|2+2"
    assert not plan.has_like_stages
    assert planned((2,), (2,)).degree_words == ""


@pytest.mark.parametrize(
    ("update", "words"),
    [
        ({"mesh": {"pp": 3, "cp": 2}}, "divide no tokens or experts"),
        (
            {"sync": {"name": "power-sgd"}},
            "'power-sgd' needs equally many tensor ranks of every stage, not 4, 2",
        ),
    ],
)
def test_what_such_plans_cannot_do_is_one_line(update: dict[str, object], words: str) -> None:
    plan = planned((4,), (2,))
    plan = Plan.model_validate({**plan.model_dump(), **update})
    found = [str(one) for one in check_plan(plan, GRAPH, CLUSTER)]
    assert any(words in one for one in found)


def problem(on: str = "4xl4+2xa100-80gb", **pins: object) -> Problem:
    """A job on four small devices beside two large ones."""
    found = problem_of(model="llama-1b", on=on, global_batch=16, precision="bf16", sequence=2048)
    return replace(found, pins=found.pins.replaced(**pins))


def test_every_group_of_nodes_holds_whole_pipelines() -> None:
    of = problem()
    found = ReplicaSpace(of, Bounds(of)).search()
    assert found
    estimates = [one.estimate_s for one in found]
    assert estimates == sorted(estimates)
    for one in found:
        assert check_plan(one.plan, of.job.graph, of.job.cluster) == []
        assert one.plan.ranks == of.job.cluster.ranks
        assert not one.plan.has_like_replicas
        for pipeline in zip(*(stage.replicas for stage in one.plan.stages), strict=True):
            ranks = [rank for copy in pipeline for rank in copy.ranks]
            assert len({of.job.cluster.group_index_of(rank) for rank in ranks}) == 1
        (plan, *_) = in_orders(of, one.plan)
        step_s = judged(of, Candidate(verdict=Verdict.PRUNED, reason=""), plan).step_s
        assert one.estimate_s == pytest.approx(step_s, rel=0.35)


def test_large_devices_take_more_of_the_batch() -> None:
    of = problem()
    best = ReplicaSpace(of, Bounds(of)).search()[0].plan
    small, large = (copy.micro_batches for copy in best.stages[0].replicas)
    assert small < large


@pytest.mark.parametrize("pins", [{"tp": 2}, {"dp": 5}, {"schedule": "gpipe"}, {"sharding": "zero-1"}])
def test_pins_that_no_such_plan_keeps_leave_none(pins: dict[str, object]) -> None:
    of = problem(**pins)
    assert ReplicaSpace(of, Bounds(of)).search() == []


def test_one_group_of_nodes_has_no_such_plan() -> None:
    of = problem("8xa100-80gb")
    assert ReplicaSpace(of, Bounds(of)).search() == []


def test_a_user_who_asks_for_two_replicas_gets_them_on_unlike_nodes() -> None:
    job: PlannedJob = weft.plan(
        model="llama-1b", on="4xl4+2xa100-80gb", global_batch=16, precision="bf16", sequence=2048, pp=1, dp=2
    ).job
    assert job.plan.degree_words == "4|2"
    assert plain_words(job).startswith(
        "tp 4 in 1 replica on l4, tp 2 in 1 replica on a100-80gb, DDP over 2, "
    )
    assert job.ranking is not None
    others = [one.step_s for one in job.ranking.fitting if one.layout is not None]
    assert job.prediction.step_s < 0.7 * min(others)
