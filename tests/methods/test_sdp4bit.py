"""Laws: sums inside nodes precede every reduction on two levels; few bits are priced and refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program.mutations import without_edge, without_row
from program.rendezvous import stuck_rows
from small_plans import make_plan, make_program, tiny

from weft.describe.amount import Shape
from weft.describe.cluster import Cluster, Link
from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.plan import Choice, Plan, Replica, Stage
from weft.describe.plan_file import check_plan
from weft.describe.reading import parse_toml
from weft.describe.run_file import parse_run
from weft.describe.synchronisation import gather_wire_of, wire_of
from weft.errors import InputError
from weft.methods.sdp4bit.kinds import REDUCE_BETWEEN, REDUCE_INSIDE
from weft.methods.sdp4bit.options import NAME, inside_wire, replicas_per_node
from weft.methods.sharding.kinds import REDUCE
from weft.moves.move import Context
from weft.moves.registry import all_moves
from weft.planning.compile import compile_evaluation, compile_folded
from weft.planning.planned import plan_run
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import predict
from weft.program.kinds import MAKES_GRADIENTS
from weft.program.program import Program
from weft.program.verify import verify

CONFIG = tiny(layers=2)
GRAPH = layer_graph(CONFIG)
ORDERS = [("gpipe", 1, 1), ("1f1b", 2, 1), ("breadth-first", 1, 2), ("zb-h1", 2, 1)]
TWO_NODES = parse_cluster("4xa100-80gb")


def few(**options: object) -> Choice:
    return Choice(name=NAME, options={"replicas_per_node": 4, **options})


def few_bits(*order: str | int, dp: int = 4, sharding: str = "zero-1", **options: object) -> Plan:
    schedule, pp, loops = order or ORDERS[0]
    plan = make_plan(CONFIG, pp=pp, dp=dp, loops=loops, schedule=schedule, precision="bf16")
    sync = Choice(name=NAME, options={"replicas_per_node": 2, **options})
    return plan.model_copy(update={"sync": sync, "sharding": sharding})


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("sharding", ["zero-1", "zero-2"])
def test_sums_inside_nodes_come_between_backward_passes_and_their_reduction(
    order: tuple[str, int, int], slices: int, sharding: str
) -> None:
    plan = few_bits(*order, sharding=sharding, slices=slices)
    program = make_program(CONFIG, plan)
    assert verify(program) == []
    assert not stuck_rows(program)
    columns, edges = program.columns, program.edges
    kind, rows = columns.kind, {code: np.flatnonzero(columns.kind == code) for code in KINDS}
    assert len(rows[REDUCE_INSIDE]) == slices * len(rows[REDUCE]) > 0
    assert len(rows[REDUCE_BETWEEN]) == (slices - 1) * len(rows[REDUCE])
    makers = {
        row: set(edges.source[(edges.target == row) & np.isin(kind[edges.source], MAKES_GRADIENTS)].tolist())
        for row in (*rows[REDUCE_INSIDE].tolist(), *rows[REDUCE].tolist())
    }
    for row in rows[REDUCE].tolist():
        inside = edges.source[(edges.target == row) & (kind[edges.source] == REDUCE_INSIDE)]
        assert len(inside) == 1
        assert makers[int(inside[0])] == makers[row] != set()
    # All slices together are the gradient, on each level.
    dense = make_program(CONFIG, plan.model_copy(update={"sync": Choice(name="dense")})).columns
    whole = dense.bytes[dense.kind == REDUCE].sum()
    assert columns.bytes[rows[REDUCE_INSIDE]].sum() == whole
    assert columns.bytes[rows[REDUCE]].sum() + columns.bytes[rows[REDUCE_BETWEEN]].sum() == whole


KINDS = (REDUCE_INSIDE, REDUCE_BETWEEN, REDUCE)


@pytest.mark.parametrize(("dp", "per_node"), [(2, 2), (4, 1), (4, 4)])
def test_replicas_on_one_level_reduce_at_once(dp: int, per_node: int) -> None:
    program = make_program(CONFIG, few_bits(dp=dp, replicas_per_node=per_node, slices=2))
    assert not np.isin(program.columns.kind, [REDUCE_INSIDE, REDUCE_BETWEEN]).any()


def test_an_evaluation_reduces_nothing() -> None:
    program = compile_evaluation(few_bits(), GRAPH)
    assert verify(program) == []
    assert not np.isin(program.columns.kind, KINDS).any()


def _first(program: Program, kind: int) -> int:
    return int(np.flatnonzero(program.columns.kind == kind)[0])


def _with_others(program: Program) -> Program:
    """The first sum inside a node with the first replicas of both nodes."""
    group = program.columns.group.copy()
    row = _first(program, REDUCE_INSIDE)
    members = program.groups[group[row]]
    group[program.columns.kind == REDUCE_INSIDE] = len(program.groups)
    groups = (*program.groups, (members[0], members[0] + 2))
    return replace(program, columns=replace(program.columns, group=group), groups=groups)


def _unrelated(program: Program) -> Program:
    edges, kind = program.edges, program.columns.kind
    row = _first(program, REDUCE_INSIDE)
    into = np.flatnonzero((edges.source == row) & np.isin(kind[edges.target], KINDS))
    return without_edge(program, int(into[0]))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            lambda program: without_row(program, _first(program, REDUCE_INSIDE)),
            "follow one sum inside its node",
        ),
        (
            lambda program: without_row(program, _first(program, REDUCE_BETWEEN)),
            "3 further sums between nodes",
        ),
        (_with_others, "is not with 2 neighbours of its reduction"),
        (_unrelated, "follow one sum inside its node"),
    ],
)
def test_a_program_that_sums_otherwise_is_refused(broken: Callable[[Program], Program], said: str) -> None:
    program = make_program(CONFIG, few_bits(slices=2))
    assert said in "; ".join(str(one) for one in verify(broken(program)))


@st.composite
def placements(draw: st.DrawFn) -> tuple[Cluster, list[tuple[int, ...]]]:
    """Nodes of one or two sizes, and the ranks of a stage's replicas, lane by lane."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    cluster = parse_cluster("+".join(f"{size}xa100-80gb" for size in sizes))
    lanes = draw(st.integers(1, 2))
    order = draw(st.permutations(range(sum(sizes))))
    copies = [tuple(order[at : at + lanes]) for at in range(0, len(order) - lanes + 1, lanes)]
    return cluster, sorted(copies) if draw(st.booleans()) else copies


@given(placements())
def test_neighbours_inside_a_node_are_whole_parts_of_every_lane(
    placed: tuple[Cluster, list[tuple[int, ...]]],
) -> None:
    cluster, copies = placed
    if not copies:
        return
    stage = Stage(layers=(0,), replicas=tuple(Replica(ranks=ranks, micro_batches=1) for ranks in copies))
    size = replicas_per_node((stage,), cluster)
    assert len(copies) % size == 0
    if size == 1:
        return
    for lane in zip(*sorted(copies), strict=True):
        order = sorted(lane)
        assert list(lane) == order
        nodes = [cluster.node_of(rank) for rank in order]
        assert all(len(set(nodes[at : at + size])) == 1 for at in range(0, len(order), size))
        # No node is in two places.
        assert len([node for node, _ in groupby(nodes)]) == len(set(nodes))


def slow(bytes_per_s: float) -> Cluster:
    """Two nodes of two devices with a link of this bandwidth."""
    cluster = parse_cluster("16xa100-80gb")
    group = replace(cluster.groups[0], devices=2, count=2)
    return Cluster(name="slow", groups=(group,), links={(group.name, group.name): Link(bytes_per_s, 1e-5)})


def test_few_bits_are_faster_over_slow_links_the_slower_the_more() -> None:
    plan, ratios = few_bits(), []
    for bytes_per_s in (1e9, 1e8, 1e7, 1e4):
        model = CostModel(graph=GRAPH, cluster=slow(bytes_per_s))
        dense = plan.model_copy(update={"sync": Choice(name="dense")})
        steps = [predict(model, one, make_program(CONFIG, one)).prediction.step_s for one in (dense, plan)]
        ratios.append(steps[0] / steps[1])
    assert ratios == sorted(ratios)
    # In the end that of the bytes: 4 and 2 for a weight, or its two codes and scales. A ring of four ranks
    # brings three quarters over the link, a sum between nodes a half.
    few = (4 + 32 / 128) * 3 / 4 + (4 + 32 / 2048) / 2
    assert ratios[-1] == pytest.approx(6 * 8 * 3 / 4 / few, rel=0.02)


def test_a_slice_crosses_between_nodes_while_the_next_is_summed_inside() -> None:
    model = CostModel(graph=GRAPH, cluster=slow(1e9))
    plans = [few_bits(slices=slices) for slices in (1, 4)]
    timelines = [predict(model, one, make_program(CONFIG, one)).simulation.timeline for one in plans]
    overlaps = []
    for timeline in timelines:
        inside = timeline.kind == REDUCE_INSIDE
        between = np.isin(timeline.kind, [REDUCE, REDUCE_BETWEEN])
        mine = (timeline.rank == 0) & (timeline.step == 0)
        first_start = timeline.start_ns[mine & between].min()
        overlaps.append(bool(first_start < timeline.end_ns[mine & inside].max()))
    assert overlaps == [False, True]


def test_a_folded_program_is_priced_like_the_whole() -> None:
    cluster = slow(1e9)
    model = CostModel(graph=GRAPH, cluster=cluster)
    plan = few_bits(slices=2)
    whole = predict(model, plan, make_program(CONFIG, plan)).prediction
    folded = predict(model, plan, compile_folded(plan, GRAPH, cluster)).prediction
    assert folded.step_s == pytest.approx(whole.step_s, rel=1e-6)
    assert folded.peak_bytes == whole.peak_bytes


def test_bytes_are_those_of_codes_and_scales() -> None:
    plan = few_bits()
    # 8 and 4 bits with a scale for 128 gradients, per byte of gradients in fp32.
    assert inside_wire(plan).inside == pytest.approx((8 + 32 / 128) / 32)
    assert wire_of(plan).between == pytest.approx((4 + 32 / 128) / 32)
    assert gather_wire_of(plan).between == pytest.approx((4 + 32 / 2048) / 16)


def test_own_ranges_take_room_on_every_rank() -> None:
    model, plan = CostModel(graph=GRAPH, cluster=slow(1e9)), few_bits()
    peaks = [
        predict(model, one, make_program(CONFIG, one)).prediction.peak_bytes
        for one in (plan, few_bits(weights="whole"))
    ]
    parameters = sum(layer.parameters(Shape(1, CONFIG.sequence)) for layer in GRAPH.layers)
    assert sum(peaks[0]) - sum(peaks[1]) == pytest.approx(2 * parameters * 1.03, rel=0.01)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sharding": "zero-0"}, "sdp4bit: replicas that each step all weights tell each other no weights"),
        ({"sharding": "zero-3"}, "sdp4bit: replicas keep no whole weights"),
        ({"island": 2}, "sdp4bit: it has two levels of its own, and islands would add a third"),
        ({"sync": few(weight_bits=9)}, "sync.options: weight_bits: 9"),
        ({"sync": few(gradient_group=48)}, "sync.options: gradient_group: 48; smoothing transforms 32"),
        ({"sync": few(replicas_per_node=3)}, "replicas_per_node is 3; the"),
        ({"sync": Choice(name=NAME)}, "replicas_per_node is None; the replicas' places in"),
    ],
)
def test_what_does_not_go_together_is_refused(change: dict[str, object], said: str) -> None:
    plan = few_bits(replicas_per_node=4).model_copy(update=change)
    lines = [str(one) for one in check_plan(plan, GRAPH, TWO_NODES)]
    assert any(said in line for line in lines), lines
    cause = [line for line in lines if "fingerprint" not in line]
    assert len(cause) == 1, cause


def test_the_cluster_decides_who_are_neighbours() -> None:
    text = (
        '[model]\npreset = "gpt2"\n[train]\nglobal_batch = 32\n[cluster]\nuse = "16xa100-80gb"\n'
        '[goal]\ncontract = "empirical"\n[plan]\ndp = 16\nsharding = "zero-1"\n'
        '[sync]\nmethod = "sdp4bit"\n'
    )
    plan = plan_run(parse_run(parse_toml(text, "run.toml"))).plan
    assert plan.sync == Choice(name=NAME, options={"replicas_per_node": 8})
    with pytest.raises(InputError, match="replicas_per_node: weft takes it from the cluster"):
        parse_run(parse_toml(text + "replicas_per_node = 4\n", "run.toml"))


def test_the_move_gives_a_plan_its_neighbours_and_finds_none_where_nothing_is_shared_out() -> None:
    move = all_moves()["send few bits"]
    dense = few_bits().model_copy(update={"sync": Choice(name="dense")})
    context = Context(plan=dense, graph=GRAPH, cluster=TWO_NODES)
    assert move.applies(context) is None
    assert move.apply(context).sync.options == {"replicas_per_node": 4}
    whole = Context(plan=dense.model_copy(update={"sharding": "zero-0"}), graph=GRAPH, cluster=TWO_NODES)
    assert move.applies(whole) is not None
