"""Every move through the same laws: it says why not, or its plan is legal and owes the same work."""

from dataclasses import replace

import pytest
from moves.contexts import context

from weft.describe.cluster_file import parse_cluster
from weft.describe.contract import Contract
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.models import resolve_model
from weft.describe.plan_file import check_plan
from weft.errors import InputError
from weft.moves.layout import build_plan, flops_per_layer, refuse
from weft.moves.layout_of_plan import layout_of
from weft.moves.move import Context
from weft.moves.registry import all_moves
from weft.planning.compile import compile_plan
from weft.program.verify import verify

MOVES = all_moves()


@pytest.mark.parametrize("name", sorted(MOVES))
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "breadth-first"])
def test_a_move_refuses_with_a_reason_or_gives_a_legal_plan(name, schedule):
    before = context(schedule=schedule)
    reason = MOVES[name].applies(before)
    if reason is not None:
        assert reason.strip()
        return
    plan = MOVES[name].apply(before)
    assert check_plan(plan, before.graph, before.cluster) == []
    program = compile_plan(plan, before.graph)
    assert verify(program) == []
    assert plan.global_batch == before.plan.global_batch
    assert plan.plan_id != before.plan.plan_id


@pytest.mark.parametrize("name", sorted(MOVES))
def test_cards_are_complete(name):
    move = MOVES[name]
    assert move.name == name
    assert move.summary.endswith(".")
    assert move.source
    assert move.verify
    assert isinstance(move.contract, Contract)


def test_some_move_applies_and_some_does_not():
    reasons = [move.applies(context()) for move in MOVES.values()]
    assert None in reasons
    assert any(reason is not None for reason in reasons)


def test_more_and_less_pipeline_parallelism_undo_each_other():
    before = context()
    there = MOVES["more pipeline parallelism"].apply(before)
    back = MOVES["more data parallelism"].apply(
        Context(plan=there, graph=before.graph, cluster=before.cluster)
    )
    assert back.plan_id == before.plan.plan_id


def test_more_and_less_tensor_parallelism_undo_each_other():
    before = context()
    there = MOVES["more tensor parallelism"].apply(before)
    assert there.mesh == {"pp": 2, "dp": 1, "tp": 2}
    back = MOVES["less tensor parallelism"].apply(
        Context(plan=there, graph=before.graph, cluster=before.cluster)
    )
    assert back.plan_id == before.plan.plan_id


def test_more_and_less_context_parallelism_undo_each_other():
    before = context()
    there = MOVES["more context parallelism"].apply(before)
    assert there.mesh == {"pp": 2, "dp": 1, "cp": 2}
    assert there.cp == 2
    back = MOVES["less context parallelism"].apply(
        Context(plan=there, graph=before.graph, cluster=before.cluster)
    )
    assert back.plan_id == before.plan.plan_id


def test_a_layout_reads_back_from_its_plan():
    before = context(schedule="breadth-first", loops=2)
    assert layout_of(before.plan, flops_per_layer(before.job)) == Layout(
        pp=2, dp=2, loops=2, micro_batch_size=2, schedule="breadth-first"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pp": 16}, "the cluster has 8"),
        ({"micro_batch_size": 3}, "nearest global batch: 18"),
        ({"loops": 4, "schedule": "breadth-first"}, "the model has 6 layers"),
        ({"loops": 2}, "1f1b"),
        ({"pp": 4, "cp": 2}, "pp x dp x cp = 16 ranks, the cluster has 8"),
        (
            {"cp": 2, "tp": 3, "pp": 1, "dp": 1},
            "tp 3 does not divide",
        ),
    ],
)
def test_an_impossible_layout_says_why(changes, expected):
    layout = {
        "pp": 2,
        "dp": 2,
        "loops": 1,
        "micro_batch_size": 2,
        "schedule": "1f1b",
    }
    graph = layer_graph(resolve_model("gpt-1m"))
    job = Job(graph=graph, cluster=parse_cluster("8xa100-80gb"), global_batch=16, sequence=256)
    wanted = Layout(**{**layout, **changes})
    assert expected in (refuse(job, wanted) or "")
    with pytest.raises(InputError):
        build_plan(job, wanted, flops_per_layer(job))


def uneven(**changes):
    """Two stages of one and five layers, replicas of six and two micro-batches, devices in another order."""
    before = context()
    layout = Layout(
        **{
            "pp": 2,
            "dp": 2,
            "loops": 1,
            "micro_batch_size": 2,
            "schedule": "1f1b",
            "layers_per_stage": (1, 5),
            "micro_batches_per_replica": (6, 2),
            "rank_order": (3, 1, 2, 0),
            **changes,
        }
    )
    job = before.job
    plan = build_plan(job, layout, flops_per_layer(job))
    return Context(plan=plan, graph=before.graph, cluster=before.cluster)


def after(name, before):
    assert MOVES[name].applies(before) is None
    return layout_of(MOVES[name].apply(before), flops_per_layer(before.job))


def test_another_schedule_leaves_layers_shares_and_devices_as_they_are():
    there = after("schedule gpipe", uneven())
    assert there == replace(layout_of(uneven().plan), schedule="gpipe")


def test_other_micro_batches_are_as_many_samples_of_every_replica():
    smaller = after("smaller micro-batches", uneven())
    assert (smaller.micro_batches_per_replica, smaller.layers_per_stage) == ((12, 4), (1, 5))
    assert after("larger micro-batches", uneven()).micro_batches_per_replica == (3, 1)
    odd = uneven(micro_batches_per_replica=(5, 3))
    assert MOVES["larger micro-batches"].applies(odd) == "a replica has an odd number of micro-batches"


def test_another_mesh_is_balanced_anew():
    assert after("more data parallelism", uneven()) == Layout(
        pp=1, dp=4, loops=1, micro_batch_size=2, schedule="1f1b"
    )
