"""A layout and its plan say the same; tensor ranks are neighbours; what cannot be is refused and why."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.models import resolve_model
from weft.describe.plan_file import check_plan, parse_plan
from weft.errors import InputError
from weft.moves.layout import Job, Layout, build_plan, flops_per_layer, layout_of, refuse
from weft.planning.compile import compile_plan
from weft.program.verify import verify

CLUSTER = parse_cluster("16xa100-80gb")
JOB = Job(
    graph=layer_graph(resolve_model("gpt-1m")),
    cluster=CLUSTER,
    global_batch=16,
    sequence=256,
    precision="bf16",
)

layouts = st.builds(
    Layout,
    pipeline_parallel=st.sampled_from([1, 2, 4]),
    data_parallel=st.sampled_from([1, 2, 4]),
    tensor_parallel=st.sampled_from([1, 2, 4]),
    context_parallel=st.sampled_from([1, 2]),
    loops=st.sampled_from([1, 2]),
    micro_batch_size=st.sampled_from([1, 2]),
    schedule=st.sampled_from(["1f1b", "gpipe", "breadth-first", "depth-first", "chimera", "zb-v"]),
    sharding=st.sampled_from(["zero-0", "zero-1", "zero-2", "zero-3"]),
    recompute=st.sampled_from(["none", "full"]),
    blocking=st.sampled_from([(), ("messages",), ("messages", "reductions")]),
)


def layout(**changes):
    return Layout(
        **{
            "pipeline_parallel": 2,
            "data_parallel": 2,
            "loops": 1,
            "micro_batch_size": 2,
            "schedule": "1f1b",
            **changes,
        }
    )


@settings(max_examples=60, deadline=None)
@given(layouts)
def test_a_legal_layout_is_a_legal_plan_and_reads_back(wanted):
    assume(refuse(JOB, wanted) is None)
    plan = build_plan(JOB, wanted, flops_per_layer(JOB))
    assert check_plan(plan, JOB.graph, CLUSTER) == []
    assert layout_of(plan) == wanted
    assert plan.ranks == wanted.ranks


@settings(max_examples=40, deadline=None)
@given(layouts)
def test_the_ranks_of_a_replica_are_neighbours_inside_a_node(wanted):
    assume(refuse(JOB, wanted) is None)
    for stage in build_plan(JOB, wanted, flops_per_layer(JOB)).stages:
        for copy in stage.replicas:
            assert copy.ranks == tuple(range(copy.ranks[0], copy.ranks[0] + wanted.width))
            assert len({CLUSTER.node_of(rank) for rank in copy.ranks}) == 1


@pytest.mark.parametrize("sharding", ["zero-0", "zero-1", "zero-2", "zero-3"])
def test_plans_of_tensor_ranks_and_shards_compile_to_valid_programs(sharding):
    plan = build_plan(
        JOB, layout(tensor_parallel=2, sharding=sharding, recompute="full"), flops_per_layer(JOB)
    )
    assert verify(compile_plan(plan, JOB.graph)) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tensor_parallel": 8}, "pp x dp x tp = 32 ranks, the cluster has 16"),
        ({"tensor_parallel": 3}, "nearest tp: 2"),
        ({"data_parallel": 1, "sharding": "zero-1"}, "nearest sharding: zero-0"),
        ({"sharding": "zero-2", "blocking": ("reductions",)}, "nearest sharding: zero-1"),
    ],
)
def test_what_cannot_be_divided_or_shared_says_why(changes, expected):
    assert expected in (refuse(JOB, layout(**changes)) or "")


def test_the_text_names_what_is_not_the_default():
    assert str(layout()) == "pp 2 x dp 2, 1f1b, micro-batch size 2"
    full = layout(tensor_parallel=4, sharding="zero-3", recompute="full", blocking=("messages",))
    assert str(full) == (
        "pp 2 x dp 2 x tp 4, 1f1b, micro-batch size 2, zero-3, recompute full, blocking messages"
    )
    islands = layout(data_parallel=4, sharding="zero-3", island=2)
    assert str(islands) == "pp 2 x dp 4, 1f1b, micro-batch size 2, zero-3 in islands of 2"


def test_stages_that_differ_in_recompute_have_no_layout():
    plan = build_plan(JOB, layout(), flops_per_layer(JOB))
    first = plan.stages[0].model_copy(update={"recompute": "full"})
    with pytest.raises(InputError, match="differ in recompute"):
        layout_of(plan.model_copy(update={"stages": (first, *plan.stages[1:])}))


def test_a_written_plan_keeps_every_choice():
    wanted = layout(tensor_parallel=2, sharding="zero-2", island=2, recompute="full", blocking=("messages",))
    plan = build_plan(JOB, wanted, flops_per_layer(JOB))
    read = parse_plan(plan.model_dump(mode="json"))
    assert read.plan_id == plan.plan_id
    assert layout_of(read) == wanted
