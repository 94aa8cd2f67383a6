"""A layout and its plan say the same; tensor ranks are neighbours; what cannot be is refused and why."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.models import resolve_model
from weft.describe.plan import RECOMPUTES
from weft.describe.plan_file import check_plan, parse_plan_file
from weft.errors import InputError
from weft.moves.layout import build_plan, flops_per_layer, refuse
from weft.moves.layout_of_plan import layout_of
from weft.planning.compile import compile_folded, compile_plan
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import predict
from weft.program.verify import verify

CLUSTER = parse_cluster("16xa100-80gb")
JOB = Job(
    graph=layer_graph(resolve_model("gpt-1m")),
    cluster=CLUSTER,
    global_batch=16,
    sequence=256,
    precision="bf16",
)

LOOPS = {
    "1f1b": [1],
    "gpipe": [1],
    "breadth-first": [1, 2],
    "depth-first": [1, 2],
    "chimera": [1],
    "zb-v": [2],
}


@st.composite
def layouts(draw):
    """Layouts with no more ranks than there are; most can run the job."""
    schedule = draw(st.sampled_from([*LOOPS]))
    degrees, ranks = {}, CLUSTER.ranks
    for axis, most in {"pp": 4, "dp": 4, "tp": 4, "cp": 2}.items():
        degrees[axis] = draw(st.sampled_from([one for one in (1, 2, 4) if one <= min(most, ranks)]))
        ranks //= degrees[axis]
    return Layout(
        **degrees,
        loops=draw(st.sampled_from(LOOPS[schedule])),
        micro_batch_size=draw(st.sampled_from([1, 2])),
        schedule=schedule,
        sharding=draw(
            st.sampled_from(["zero-0", "zero-1", "zero-2", "zero-3"] if degrees["dp"] > 1 else ["zero-0"])
        ),
        recompute=draw(st.sampled_from(["none", "full"])),
        blocking=draw(st.sampled_from([(), ("messages",), ("messages", "reductions")])),
    )


def layout(**changes):
    return Layout(
        **{
            "pp": 2,
            "dp": 2,
            "loops": 1,
            "micro_batch_size": 2,
            "schedule": "1f1b",
            **changes,
        }
    )


@given(layouts())
def test_a_legal_layout_is_a_legal_plan_and_reads_back(wanted):
    assume(refuse(JOB, wanted) is None)
    plan = build_plan(JOB, wanted, flops_per_layer(JOB))
    assert check_plan(plan, JOB.graph, CLUSTER) == []
    assert layout_of(plan, flops_per_layer(JOB)) == wanted
    assert plan.ranks == wanted.ranks
    for stage in range(len(plan.stages)):
        assert plan.grid(stage) == wanted.grid
        assert plan.shape(stage) == wanted.shape(JOB.sequence)


@st.composite
def uneven_layouts(draw):
    """Layouts whose stages, replicas and ranks are unlike each other; most can run the job."""
    wanted = draw(layouts())
    shares = [1] * wanted.dp
    for _ in range(JOB.global_batch // wanted.micro_batch_size - wanted.dp):
        shares[draw(st.integers(0, wanted.dp - 1))] += 1
    cuts = draw(st.permutations(range(1, len(JOB.graph.layers))))[: wanted.stages - 1]
    borders = [0, *sorted(cuts), len(JOB.graph.layers)]
    order = draw(st.permutations(range(min(wanted.ranks, CLUSTER.ranks))))
    firsts = range(0, len(order), wanted.width)
    words = st.lists(st.sampled_from(RECOMPUTES), min_size=wanted.stages, max_size=wanted.stages)
    return replace(
        wanted.recomputing(draw(words)),
        layers_per_stage=tuple(last - first for first, last in pairwise(borders)),
        micro_batches_per_replica=tuple(shares),
        rank_order=tuple(rank for first in firsts for rank in sorted(order[first : first + wanted.width])),
    )


@given(uneven_layouts())
def test_an_uneven_layout_is_a_legal_plan_and_reads_back(wanted):
    assume(refuse(JOB, wanted) is None)
    plan = build_plan(JOB, wanted, flops_per_layer(JOB))
    assert check_plan(plan, JOB.graph, CLUSTER) == []
    assert tuple(len(stage.layers) for stage in plan.stages) == wanted.layers_per_stage
    assert tuple(stage.recompute for stage in plan.stages) == wanted.recomputes
    found = layout_of(plan)
    if len(set(wanted.micro_batches_per_replica)) == 1:
        wanted = replace(wanted, micro_batches_per_replica=None)
    if list(wanted.rank_order) == sorted(wanted.rank_order):
        wanted = replace(wanted, rank_order=None)
    assert found == wanted


@settings(max_examples=15)
@given(uneven_layouts())
def test_programs_of_uneven_layouts_verify_and_can_be_simulated(wanted):
    # Of replicas with unequal shares that share states out, some orders come to other collectives.
    wanted = replace(wanted, sharding="zero-0", blocking=())
    assume(refuse(JOB, wanted) is None)
    plan = build_plan(JOB, wanted, flops_per_layer(JOB))
    program = compile_plan(plan, JOB.graph)
    assert verify(program) == []
    predicted = predict(
        CostModel(graph=JOB.graph, cluster=CLUSTER), plan, compile_folded(plan, JOB.graph, CLUSTER)
    )
    assert len(predicted.prediction.peak_bytes) == wanted.ranks


@given(layouts())
def test_the_ranks_of_a_replica_are_neighbours_inside_a_node(wanted):
    assume(refuse(JOB, wanted) is None)
    for stage in build_plan(JOB, wanted, flops_per_layer(JOB)).stages:
        for copy in stage.replicas:
            assert copy.ranks == tuple(range(copy.ranks[0], copy.ranks[0] + wanted.width))
            assert len({CLUSTER.node_of(rank) for rank in copy.ranks}) == 1


@pytest.mark.parametrize("sharding", ["zero-0", "zero-1", "zero-2", "zero-3"])
def test_plans_of_tensor_ranks_and_shards_compile_to_valid_programs(sharding):
    plan = build_plan(JOB, layout(tp=2, sharding=sharding, recompute="full"), flops_per_layer(JOB))
    assert verify(compile_plan(plan, JOB.graph)) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tp": 8}, "pp x dp x tp = 32 ranks, the cluster has 16"),
        ({"tp": 3}, "nearest tp: 2"),
        ({"dp": 1, "sharding": "zero-1"}, "nearest sharding: zero-0"),
        ({"layers_per_stage": (2, 2, 2)}, "layers for 3 stages are given, pp x loops = 2 stages"),
        (
            {"recompute": "full", "recompute_per_stage": ("full", "none", "none")},
            "recompute of 3 stages is given, pp x loops = 2 stages",
        ),
        ({"layers_per_stage": (6, 0)}, "stage 1 is given no layer; at least 1 is needed"),
        ({"layers_per_stage": (3, 4)}, "the stages are given 7 layers, the model has 6"),
        ({"rank_order": (0, 1)}, "the rank order has 2 devices, the layout has 4 ranks"),
        ({"rank_order": (0, 1, 1, 3)}, "leaves device 2 out; each of 0 to 3 must be named once"),
        (
            {"dp": 1, "tp": 2, "rank_order": (0, 2, 3, 1)},
            "ranks of one replica of a stage sit on devices 3 1; nearest: 1 3",
        ),
        ({"micro_batches_per_replica": (8,)}, "shares for 1 replica are given, dp is 2"),
        ({"micro_batches_per_replica": (8, 0)}, "replica 1 is given no micro-batch; at least 1 is needed"),
        (
            {"micro_batches_per_replica": (5, 2)},
            "7 micro-batches of 2 = 14 samples, the global batch is 16; nearest global batch: 14",
        ),
        ({"schedule": "chimera", "micro_batches_per_replica": (5, 3)}, "chimera"),
    ],
)
def test_what_cannot_be_divided_or_shared_says_why(changes, expected):
    assert expected in (refuse(JOB, layout(**changes)) or "")


def test_the_text_names_what_is_not_the_default():
    assert str(layout()) == "pp 2 x dp 2, 1f1b, micro-batch size 2"
    full = layout(tp=4, sharding="zero-3", recompute="full", blocking=("messages",))
    assert str(full) == (
        "pp 2 x dp 2 x tp 4, 1f1b, micro-batch size 2, zero-3, recompute full, blocking messages"
    )
    islands = layout(dp=4, sharding="zero-3", island=2)
    assert str(islands) == "pp 2 x dp 4, 1f1b, micro-batch size 2, zero-3 in islands of 2"


def test_the_text_is_brief_about_what_is_uneven():
    wanted = layout(
        pp=4,
        layers_per_stage=(3, 1, 1, 1),
        micro_batches_per_replica=(5, 3),
        rank_order=(4, 5, 6, 7, 0, 1, 3, 2),
    )
    assert str(wanted) == (
        "pp 4 x dp 2, 1f1b, micro-batch size 2, layers 3+1x3, shares 5+3, devices 4-7 0-1 3 2"
    )
    scattered = layout(pp=8, rank_order=tuple(range(15, -1, -1)))
    assert str(scattered).endswith(", devices 15 14 13 12 11 10 and 10 runs more")
    assert str(wanted.regular) == "pp 4 x dp 2, 1f1b, micro-batch size 2"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("full", "full", "none", "none"), "recompute full in stages 0-1"),
        (("none", "none", "none", "selective"), "recompute selective in stage 3"),
        (
            ("full", "selective", "full", "selective"),
            "recompute full in stages 0 2, selective in stages 1 3",
        ),
    ],
)
def test_the_text_names_the_stages_that_recompute(words, expected):
    wanted = layout(pp=4).recomputing(words)
    assert str(wanted) == f"pp 4 x dp 2, 1f1b, micro-batch size 2, {expected}"
    assert wanted.recompute == max(words, key=RECOMPUTES.index)
    assert str(wanted.recomputing(["full"] * 4)).endswith("recompute full")
    assert wanted.recomputing("none") == layout(pp=4)


def test_stages_recompute_selectively_only_where_the_model_knows_its_products():
    layers = tuple(replace(one, products=None) for one in JOB.graph.layers)
    job = replace(JOB, graph=replace(JOB.graph, layers=layers))
    mixed = layout().recomputing(("full", "selective"))
    assert "nearest recompute: full" in (refuse(job, mixed) or "")
    assert refuse(job, layout().recomputing(("full", "none"))) is None


@pytest.mark.parametrize(
    ("ranks", "layers", "expected"),
    [
        ((4, 5), (3, 4, 5), "stages of device 0 of its pipelines lie on ranks 0 and 4"),
        ((0, 1), (5, 4, 3), "no cuts of a chain of layers"),
    ],
)
def test_plans_of_no_layout_say_why(ranks, layers, expected):
    wanted = layout(loops=2, layers_per_stage=(1, 1, 1, 3), schedule="breadth-first")
    plan = build_plan(JOB, wanted, flops_per_layer(JOB))
    third = plan.stages[2]
    copies = tuple(
        copy.model_copy(update={"ranks": (rank,)}) for copy, rank in zip(third.replicas, ranks, strict=True)
    )
    third = third.model_copy(update={"replicas": copies})
    last = plan.stages[3].model_copy(update={"layers": layers})
    with pytest.raises(InputError, match=expected):
        layout_of(plan.model_copy(update={"stages": (*plan.stages[:2], third, last)}))


def test_a_written_plan_keeps_every_choice():
    wanted = layout(tp=2, sharding="zero-2", island=2, blocking=("messages",))
    wanted = wanted.recomputing(("full", "selective"))
    plan = build_plan(JOB, wanted, flops_per_layer(JOB))
    read = parse_plan_file(plan.model_dump(mode="json")).plan
    assert read.plan_id == plan.plan_id
    assert layout_of(read, flops_per_layer(JOB)) == wanted
