"""Compiling is a pure function of the plan; messages and buckets have the sizes the layers say."""

import pytest

from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.models import resolve_model
from weft.describe.plan import Plan
from weft.methods.sharding.kinds import REDUCE
from weft.moves.layout import build_plan, flops_per_layer
from weft.planning.compile import (
    compile_evaluation,
    compile_evaluation_part,
    compile_folded,
    compile_part,
    compile_plan,
)
from weft.program.kinds import FORWARD, SEND_ACTIVATION, STEP
from weft.program.rank_program import digests, part_of
from weft.program.verify import verify


def planned(**changes):
    graph = layer_graph(resolve_model("gpt-1m"))
    job = Job(graph=graph, cluster=parse_cluster("8xa100-80gb"), global_batch=16, sequence=256)
    layout = {
        "pp": 2,
        "dp": 2,
        "loops": 2,
        "micro_batch_size": 2,
        "schedule": "breadth-first",
    }
    return build_plan(job, Layout(**{**layout, **changes}), flops_per_layer(job)), graph


def test_equal_plans_compile_to_equal_programs():
    plan, graph = planned()
    again = Plan.model_validate(plan.model_dump())
    assert (compile_plan(plan, graph).ids == compile_plan(again, graph).ids).all()


def test_counts_follow_the_plan():
    plan, graph = planned()
    kinds = compile_plan(plan, graph).columns.kind
    assert (kinds == FORWARD).sum() == plan.micro_batches * len(plan.stages)
    assert (kinds == SEND_ACTIVATION).sum() == plan.micro_batches * (len(plan.stages) - 1)
    assert (kinds == REDUCE).sum() == (kinds == STEP).sum() == 2 * len(plan.stages)


def test_a_program_of_another_length_is_that_of_a_plan_with_such_shares():
    plan, graph = planned()
    longer, _ = planned(micro_batch_size=1)
    programs = (
        compile_plan(plan, graph, micro_batches=longer.micro_batches // 2),
        compile_plan(longer, graph),
    )
    assert (programs[0].ids == programs[1].ids).all()
    assert (programs[0].columns.rank == programs[1].columns.rank).all()


@pytest.mark.parametrize(
    "layout",
    [
        {"sharding": "zero-3"},
        {"dp": 4, "sharding": "zero-1", "island": 2},
        {"dp": 1, "loops": 1, "schedule": "1f1b", "tp": 2, "cp": 2},
        {"dp": 2, "loops": 1, "schedule": "chimera"},
        {"micro_batches_per_replica": (5, 3), "sharding": "zero-1", "rank_order": (3, 0, 2, 1)},
    ],
    ids=["weights shared out", "islands", "lanes", "two paths", "uneven shares and order"],
)
def test_the_parts_of_a_plans_ranks_are_those_of_its_whole_programs(layout):
    plan, graph = planned(**layout)
    pairs = ((compile_plan, compile_part), (compile_evaluation, compile_evaluation_part))
    for whole, part in pairs:
        program = whole(plan, graph)
        told = digests(program).tolist()
        for rank in range(plan.ranks):
            own, taken = part(plan, graph, rank), part_of(program, rank)
            assert own.digest == taken.digest == told[rank]
            assert own.ids.tolist() == taken.ids.tolist()
            assert (own.first_row, own.groups, own.stages) == (taken.first_row, taken.groups, taken.stages)


def test_messages_carry_one_hidden_state_and_buckets_all_gradients():
    plan, graph = planned()
    columns = compile_plan(plan, graph).columns
    assert set(columns.bytes[columns.kind == SEND_ACTIVATION].tolist()) == {4 * 2 * 256 * 128}
    one_replica = columns.bytes[(columns.kind == REDUCE) & (columns.replica == 0)]
    assert one_replica.sum() == 4 * graph.parameters()


def test_the_evaluation_program_runs_every_micro_batch_forward_and_verifies():
    plan, graph = planned()
    program = compile_evaluation(plan, graph)
    assert verify(program) == []
    assert (program.columns.kind == FORWARD).sum() == plan.micro_batches * len(plan.stages)


def test_the_plan_id_sees_decisions():
    plan, _ = planned()
    other, _ = planned(micro_batch_size=4)
    assert plan.plan_id != other.plan_id


def folded(on, dp, **changes):
    graph, cluster = layer_graph(resolve_model("gpt-1m")), parse_cluster(on)
    layout = Layout(
        pp=2,
        dp=dp,
        loops=1,
        micro_batch_size=1,
        schedule="1f1b",
        **changes,
    )
    job = Job(graph=graph, cluster=cluster, global_batch=12, sequence=256)
    plan = build_plan(job, layout, flops_per_layer(job))
    return compile_folded(plan, graph, cluster).kept_replica is not None


def test_one_pipeline_stands_for_all_where_it_is_the_slowest_everywhere():
    assert folded("4xa100-80gb", 2)
    assert folded("2xa100-80gb+2xt4", 2)
    # Stages on an A100 and two V100, and on a V100 and two T4.
    assert folded("1xa100-80gb+3xv100-16gb+2xt4", 3)
    # The first pipeline is slower in its second stage, the second one in its first.
    crossed = (0, 2, 3, 1)
    assert not folded("2xa100-80gb+2xt4", 2, rank_order=crossed)
    assert folded("4xa100-80gb", 2, rank_order=crossed)


def test_pipelines_with_unequal_shares_are_all_kept():
    assert not folded("4xa100-80gb", 2, micro_batches_per_replica=(8, 4))
