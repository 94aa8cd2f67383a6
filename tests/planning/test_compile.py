"""Compiling is a pure function of the plan; messages and buckets have the sizes the layers say."""

from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.models import resolve_model
from weft.describe.plan import Plan
from weft.moves.layout import Job, Layout, build_plan, flops_per_layer
from weft.planning.compile import compile_evaluation, compile_plan
from weft.program.kinds import FORWARD, REDUCE, SEND_ACTIVATION, STEP
from weft.program.verify import verify


def planned(**changes):
    graph = layer_graph(resolve_model("gpt-1m"))
    job = Job(graph=graph, cluster=parse_cluster("8xa100-80gb"), global_batch=16, sequence=256)
    layout = {
        "pipeline_parallel": 2,
        "data_parallel": 2,
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


def test_the_plan_id_sees_decisions_and_not_predictions():
    plan, _ = planned()
    other, _ = planned(micro_batch_size=4)
    assert plan.plan_id != other.plan_id
    assert plan.plan_id == plan.model_copy(update={"prediction": None}).plan_id
