"""Laws: exchanges of experts between segments cost what they cost inside, and broken ones are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cut_programs import broken_borders, cluster, cut_by, predicted, require_told, run_file
from described_decoders import described
from equality_table import Row
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.rows.expert_balance import Balances
from methods.rows.expert_exchanges import FOUR, LEVELS, MIXTRAL, SHORT, Exchanges
from methods.rows.expert_exchanges import SHARED_EXPERTS as MIXED
from methods.rows.micro_batch_clipping import ClipsMicro
from one_process import Method
from program.mutations import with_value, without_edge, without_row
from small_plans import make_program

import weft
from weft.describe.cluster_file import cluster_of
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.plan import Recompute
from weft.describe.prediction import Prediction
from weft.errors import InputError
from weft.methods.expert_exchanges.kinds import (
    EXPERT_COMBINE,
    EXPERT_COMBINE_BACKWARD,
    EXPERT_DISPATCH,
    EXPERT_DISPATCH_BACKWARD,
)
from weft.methods.expert_exchanges.levels import of_nodes
from weft.methods.expert_exchanges.moves import MOVES
from weft.methods.expert_exchanges.program import NAME, WAYS, Way
from weft.methods.micro_batch_clipping.kinds import TAKE_GRADIENT
from weft.methods.sharding.kinds import REDUCE
from weft.moves.layout import build_plan
from weft.moves.move import Context
from weft.planning.compile import compile_evaluation, compile_folded
from weft.planning.decisions import decided_words
from weft.planning.job_rules import refused_by_methods
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import predict
from weft.program.kinds import BACKWARD, FORWARD
from weft.program.program import COLUMN_NAMES, Program
from weft.program.segments import BACKWARD_SEGMENT, FORWARD_SEGMENT
from weft.program.verify import require_valid, verify

KINDS_OF_BORDERS = (EXPERT_DISPATCH, EXPERT_COMBINE, EXPERT_COMBINE_BACKWARD, EXPERT_DISPATCH_BACKWARD)
run_by = partial(cut_by, name=NAME)
asking = partial(run_file, name=NAME, preset="mixtral-1m", global_batch=16)
with_ranks = partial(Row, MIXTRAL, ep=2)


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize(
    "row",
    [
        with_ranks(),
        with_ranks("1f1b", pp=2),
        with_ranks("breadth-first", dp=2, loops=2, sharding="zero-3"),
        with_ranks("depth-first", dp=2, loops=2, sharding="zero-2"),
        with_ranks("chimera", pp=2, sharding="zero-1"),
        Row(MIXED, "1f1b", ep=3, micro_batch_size=3, splits=(1,)),
        with_ranks("zb-h1", pp=2, dp=2, sharding="zero-2"),
        with_ranks("zb-v", pp=2, loops=2, methods=(Balances("buffer", samples=2, replicas=1, ranks=2),)),
        with_ranks("1f1b", pp=2, tp=2),
        with_ranks("zb-v", pp=2, cp=2, tp=2, loops=2),
        # The last forward pass, a sum of counts and the first backward pass follow each other.
        with_ranks(dp=2, micro_batches=3, methods=(Balances(ranks=2),)),
        with_ranks("1f1b", pp=2, methods=(Balances("buffer", samples=2, replicas=1, ranks=2),)),
    ],
    ids=str,
)
def test_programs_are_proven(row: Row, way: str) -> None:
    require_valid(make_program(row.model, run_by(row.plan, way=way)))


@pytest.mark.parametrize(("config", "mixtures"), [(MIXTRAL, 2), (MIXED, 1)], ids=["mixtral", "qwen2_moe"])
def test_a_mixture_exchanges_twice_in_each_pass(config: ModelConfig, mixtures: int) -> None:
    kinds = make_program(config, run_by(Row(config, ep=2).plan, way="instructions")).columns.kind
    for passes, borders in ((FORWARD, KINDS_OF_BORDERS[:2]), (BACKWARD, KINDS_OF_BORDERS[2:])):
        for kind in borders:
            assert (kinds == kind).sum() == mixtures * (kinds == passes).sum() > 0


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("ep", "most"), [(2, 2), (3, 3), (6, 3)])
def test_borders_have_room_for_the_tokens_of_all_ranks(ep: int, most: int, tp: int) -> None:
    """A token has two experts of six; a rank with one of them gets it once, also of its columns."""
    plan = run_by(Row(MIXTRAL, ep=ep, tp=tp, micro_batch_size=ep).plan, way="instructions")
    columns = make_program(MIXTRAL, plan).columns
    rows = np.isin(columns.kind, KINDS_OF_BORDERS)
    tokens = MIXTRAL.sequence
    assert set(columns.bytes[rows].tolist()) == {2 * tokens * MIXTRAL.hidden * 8}
    assert (columns.most_bytes[rows] == most * columns.bytes[rows]).all()


@pytest.mark.parametrize(("ep", "way"), [(1, "interleaved"), (2, "inside")])
def test_plans_without_segments_compile_to_the_same_table(ep: int, way: str) -> None:
    plan = Row(MIXTRAL, ep=ep).plan
    one, two = make_program(MIXTRAL, plan), make_program(MIXTRAL, run_by(plan, way=way))
    for name in COLUMN_NAMES:
        assert np.array_equal(getattr(one.columns, name), getattr(two.columns, name))
    assert one.groups == two.groups


def test_an_evaluation_exchanges_inside() -> None:
    program = compile_evaluation(run_by(with_ranks().plan, way="instructions"), layer_graph(MIXTRAL))
    require_valid(program)
    assert not np.isin(program.columns.kind, [*KINDS_OF_BORDERS, FORWARD_SEGMENT]).any()


def test_reductions_keep_their_place_between_interleaved_passes() -> None:
    row = with_ranks("breadth-first", dp=2, loops=2, micro_batches=3, sharding="zero-2")
    orders = []
    for way in WAYS[1:]:
        columns = make_program(MIXTRAL, run_by(row.plan, way=way)).columns
        rows = np.isin(columns.kind, [BACKWARD, REDUCE])
        told = (columns.kind[rows], columns.rank[rows], columns.stage[rows], columns.micro_batch[rows])
        orders.append([one.tolist() for one in told])
    ordered, interleaved = orders
    assert REDUCE in ordered[0]
    assert interleaved == ordered


def _combines_first(program: Program) -> Program:
    rows = np.flatnonzero(program.columns.kind == EXPERT_DISPATCH)
    return with_value(program, "kind", int(rows[1]), EXPERT_COMBINE)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        *broken_borders(EXPERT_DISPATCH, "expert"),
        (_combines_first, "is not the collective of its border"),
    ],
)
def test_broken_programs_are_refused(broken: Callable[[Program], Program], said: str) -> None:
    row = with_ranks(dp=2, micro_batches=1)
    problems = [
        str(one) for one in verify(broken(make_program(MIXTRAL, run_by(row.plan, way="instructions"))))
    ]
    assert any(said in one for one in problems), problems[:4]


@settings(max_examples=20)
@given(
    st.sampled_from(WAYS[1:]),
    st.sampled_from([("gpipe", 1, ()), ("gpipe", 1, (Balances(ranks=2),)), ("zb-h1", 2, ())]),
    st.data(),
)
def test_any_missing_edge_or_row_is_refused(
    way: str, order: tuple[str, int, tuple[Method, ...]], data: st.DataObject
) -> None:
    schedule, pp, methods = order
    row = Row(MIXED, schedule, pp=pp, ep=2, micro_batches=2, methods=methods)
    program = make_program(MIXED, run_by(row.plan, way=way))
    edges = np.flatnonzero(program.edges.distance == 0)
    assert verify(without_edge(program, int(data.draw(st.sampled_from(edges.tolist())))))
    assert verify(without_row(program, data.draw(st.integers(0, len(program) - 1))))


@settings(max_examples=15)
@given(
    config=st.sampled_from([MIXTRAL, MIXED]),
    order=st.sampled_from([("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("zb-h1", 2)]),
    dp=st.integers(1, 2),
    samples=st.integers(1, 4),
    ep=st.sampled_from([2, 3]),
    latency_us=st.sampled_from([0, 20]),
    synchronous=st.booleans(),
    methods=st.sampled_from([(), (Balances("sequence", ranks=1),)]),
    tp=st.sampled_from([1, 2]),
    cp=st.sampled_from([1, 2]),
)
def test_a_step_in_segments_takes_as_long_as_inside_and_beside_others_no_longer(
    config: ModelConfig,
    order: tuple[str, int],
    dp: int,
    samples: int,
    ep: int,
    latency_us: int,
    synchronous: bool,
    methods: tuple[Method, ...],
    tp: int,
    cp: int,
) -> None:
    schedule, pp = order
    size = samples * ep
    row = Row(config, schedule, pp=pp, dp=dp, ep=ep, tp=tp, cp=cp, micro_batch_size=size, methods=methods)
    on = cluster(latency_us, synchronous=synchronous)
    inside, ordered, interleaved = (
        predicted(config, run_by(row.plan, way=way), on).prediction.step_s for way in WAYS
    )
    # Every instruction is rounded to a tick.
    ticks = 1e-9 * len(make_program(config, run_by(row.plan, way=WAYS[1])))
    assert ordered == pytest.approx(inside, abs=ticks)
    assert interleaved <= ordered + 1e-6


@settings(max_examples=10)
@given(
    config=st.sampled_from([MIXTRAL, MIXED]),
    pp=st.integers(1, 2),
    samples=st.integers(1, 4),
    recompute=st.sampled_from(["full", "selective"]),
    synchronous=st.booleans(),
)
def test_a_recomputed_segment_spares_the_exchanges(
    config: ModelConfig, pp: int, samples: int, recompute: Recompute, synchronous: bool
) -> None:
    def step(recompute: Recompute, way: str) -> Prediction:
        row = Row(config, "1f1b", pp=pp, ep=2, micro_batch_size=2 * samples, recompute=recompute)
        return predicted(config, run_by(row.plan, way=way), on).prediction

    on = cluster(20, synchronous=synchronous)
    kept, again, inside = (
        step(*one) for one in (("none", WAYS[1]), (recompute, WAYS[1]), (recompute, WAYS[0]))
    )
    # Inside of passes, a layer that runs again exchanges again.
    assert kept.step_s < again.step_s < inside.step_s


def test_reductions_begin_as_early_as_in_whole_passes() -> None:
    config = SHORT("mixtral", intermediate_size=240)
    row = Row(config, "1f1b", dp=4, ep=2)
    inside, ordered = (
        predicted(config, run_by(row.plan, way=way), cluster(0, synchronous=False)).prediction.step_s
        for way in WAYS[:2]
    )
    assert ordered == pytest.approx(inside, abs=1e-6)


@pytest.mark.parametrize(
    "row",
    [
        with_ranks("1f1b", micro_batch_size=64),
        # Sums of counts between forward passes come behind both.
        with_ranks("gpipe", micro_batch_size=64, methods=(Balances("buffer", samples=64, replicas=1),)),
    ],
    ids=str,
)
def test_on_slow_links_another_micro_batch_hides_exchanges(row: Row) -> None:
    ordered, interleaved = (
        predicted(MIXTRAL, run_by(row.plan, way=way), cluster(0, synchronous=False)).prediction.step_s
        for way in WAYS[1:]
    )
    assert interleaved < 0.985 * ordered


@pytest.mark.parametrize(
    ("degrees", "per_node", "inside_nodes", "recompute", "steps_s", "peaks_gb"),
    [
        ({"dp": 8, "ep": 8}, 1, "450 GB/s", "none", (4.74, 4.74, 4.71), (67.6, 68.8)),
        ({"dp": 8, "ep": 8}, 1, "64 GB/s", "none", (5.56, 5.56, 5.05), (67.6, 68.8)),
        ({"dp": 8, "ep": 8}, 1, "64 GB/s", "selective", (6.10, 5.75, 5.14), (55.4, 57.3)),
        ({"dp": 8, "ep": 8}, 1, "64 GB/s", "full", (6.67, 6.31, 5.66), (44.5, 47.4)),
        ({"dp": 8, "ep": 4, "tp": 2}, 1, "64 GB/s", "none", (5.72, 5.72, 4.88), (65.8, 67.7)),
        ({"dp": 4, "ep": 8, "tp": 2}, 1, "450 GB/s", "none", (4.50, 4.47, 3.71), (56.5, 58.3)),
        ({"dp": 4, "ep": 8, "tp": 2}, 4, "450 GB/s", "none", (4.50, 4.51, 3.71), (56.5, 58.3)),
        ({"dp": 4, "ep": 8, "cp": 2}, 1, "450 GB/s", "none", (5.29, 5.55, 4.89), (83.3, 84.5)),
    ],
)
def test_steps_of_mixtral_on_64_h100_are_those_of_the_page(
    degrees: Mapping[str, int],
    per_node: int,
    inside_nodes: str,
    recompute: Recompute,
    steps_s: Sequence[float],
    peaks_gb: Sequence[float],
) -> None:
    node = {"name": "host", "count": 8, "device": "h100-80gb", "devices": 8, "bandwidth": inside_nodes}
    on = cluster_of({"name": "h100", "node": [node]}, "h100")
    graph = layer_graph(replace(resolve_model("mixtral-8x7b"), sequence=1024))
    job = Job(graph=graph, cluster=on, global_batch=1024, sequence=1024, precision="bf16")
    layout = Layout(
        pp=1,
        **degrees,
        loops=8,
        micro_batch_size=8,
        schedule="hybrid",
        options={"depth": 8},
        sharding="zero-2",
    )
    plan = build_plan(job, layout, [1.0] * len(graph.layers))
    stages = tuple(one.model_copy(update={"recompute": recompute}) for one in plan.stages)
    plan = plan.model_copy(update={"stages": stages})
    found = [
        predict(CostModel(graph=graph, cluster=on), each, compile_folded(each, graph, on)).prediction
        for each in (plan.model_copy(update={"methods": Exchanges(way, per_node).choices}) for way in WAYS)
    ]
    assert [one.step_s for one in found] == pytest.approx(steps_s, abs=0.006)
    peaks = [max(one.peak_bytes) / 1e9 for one in (found[0], found[-1])]
    assert peaks == pytest.approx(peaks_gb, abs=0.06)


@pytest.mark.parametrize("way", ["inside", "instructions"])
def test_blocks_with_linear_attention_are_refused(tmp_path: Path, way: str) -> None:
    described(tmp_path, "qwen3_next", num_experts=4)
    path = asking(tmp_path, way, pp=1, ep=2, micro_batch_size=2, recompute="none")
    path.write_text(path.read_text().replace('preset = "mixtral-1m"', f'hf = "{tmp_path}"'))
    refused = [one for one in refused_by_methods(weft.plan(path).job) if one.where == f"{NAME}.run"]
    assert bool(refused) == (way != "inside")


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    path = asking(tmp_path, "instructions", pp=1, micro_batch_size=2)
    path.write_text(path.read_text().replace("mixtral-1m", "llama-1m"))
    refused = [str(one) for one in refused_by_methods(weft.plan(path).job) if one.where == f"{NAME}.run"]
    assert refused == [f"{NAME}.run: llama-1m has no experts (nearest valid: leave out [{NAME}])"]


@pytest.mark.parametrize("way", ["inside", "interleaved"])
def test_a_run_file_asks_for_it_and_its_report_says_so(tmp_path: Path, way: str) -> None:
    pins = {"pp": 1, "ep": 2, "loops": 1, "micro_batch_size": 2, "recompute": "none", "schedule": "1f1b"}
    require_told(asking(tmp_path, way, **pins), NAME, way, KINDS_OF_BORDERS)


def test_a_plan_with_one_expert_rank_says_that_nothing_is_exchanged(tmp_path: Path) -> None:
    planned = weft.plan(asking(tmp_path, "interleaved", pp=1, ep=1, micro_batch_size=2)).job
    said = "expert exchanges: interleaved changes nothing, as there is one expert rank"
    assert decided_words(planned) == [said]


@pytest.mark.parametrize("way", WAYS)
def test_tensor_collectives_between_segments_are_refused_beside_it(tmp_path: Path, way: str) -> None:
    path = asking(tmp_path, way, ep=2, tp=2)
    path.write_text(f'{path.read_text()}\n[tensor-collectives]\nrun = "instructions"\n')
    with pytest.raises(InputError, match="without tensor-collectives, or nearest ep: 1"):
        weft.plan(path)


@pytest.mark.parametrize("keys", [{"tp": 2}, {"cp": 2}])
def test_a_search_takes_it_beside_ranks_that_divide_layers_or_tokens(
    tmp_path: Path, keys: dict[str, str | int]
) -> None:
    planned = weft.plan(asking(tmp_path, "interleaved", ep=2, **keys))
    assert planned.plan.method(NAME) is not None
    assert EXPERT_DISPATCH in planned.job.program.columns.kind


NODES = """
name = "nodes"
[[node]]
name = "host"
count = 2
device = "a100-80gb"
devices = {devices}
[[link]]
between = ["host", "host"]
bandwidth = "25 GB/s"
latency = "5 us"
"""


def test_a_move_to_segments_keeps_the_two_levels() -> None:
    plan = LEVELS(methods=(Exchanges("inside", 2),)).plan
    [move, *_] = MOVES
    context = Context(plan=plan, graph=layer_graph(FOUR), cluster=cluster(0, nodes=24))
    assert move.applies(context) is None
    [choice] = move.apply(context).methods
    assert choice.options == {"run": "instructions", "ranks_per_node": 2}


def asking_in_levels(folder: Path, per_node: int, devices: int, **keys: str | int) -> Path:
    """A run file for two nodes that asks for exchanges in two levels, with the cluster beside it."""
    path = asking(folder, "instructions", **keys)
    (folder / "nodes.toml").write_text(NODES.format(devices=devices))
    text = path.read_text().replace('use = "4xa100-80gb"', 'use = "nodes.toml"')
    path.write_text(text + f"ranks_per_node = {per_node}\n")
    return path


@pytest.mark.parametrize("way", WAYS)
def test_an_exchange_in_two_levels_takes_the_one_inside_nodes_longer(way: Way) -> None:
    def step_s(per_node: int, nodes: int) -> float:
        plan = LEVELS(methods=(Exchanges(way, per_node),)).plan
        return predicted(FOUR, plan, cluster(20, nodes=nodes)).prediction.step_s

    assert step_s(2, nodes=24) > step_s(1, nodes=24)
    assert step_s(4, nodes=1) == step_s(1, nodes=1)


def test_a_run_file_asks_for_two_levels(tmp_path: Path) -> None:
    planned = weft.plan(asking_in_levels(tmp_path, 2, 2, pp=1, ep=4, micro_batch_size=4))
    choice = planned.plan.method(NAME)
    assert choice is not None
    assert choice.options == {"run": "instructions", "ranks_per_node": 2}
    assert [one for one in refused_by_methods(planned.job) if one.where.startswith(NAME)] == []
    said = "expert exchanges: 2 ranks of a node first, then between nodes"
    assert said in decided_words(planned.job)
    # A plan that somebody has edited.
    edited = choice.model_copy(update={"options": {**choice.options, "ranks_per_node": 4}})
    plan = planned.plan.model_copy(update={"methods": (edited,)})
    [refused] = of_nodes(replace(planned.job, plan=plan))
    assert str(refused).endswith("2 neighbours on a node (nearest valid: 2)")


@pytest.mark.parametrize(
    ("devices", "per_node", "keys", "said"),
    [
        (4, 2, {"ep": 4, "tp": 1}, "groups have 4 neighbours on a node; nearest ranks_per_node: 4"),
        (3, 3, {"ep": 4, "tp": 1}, "groups have 1 and 3 neighbours on a node; nearest ranks_per_node: 1"),
    ],
)
def test_uneven_nodes_are_refused_in_one_line(
    tmp_path: Path, devices: int, per_node: int, keys: dict[str, int], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        weft.plan(asking_in_levels(tmp_path, per_node, devices, pp=1, dp=1, micro_batch_size=4, **keys))


def test_clipped_micro_batches_refuse_those_that_take_turns() -> None:
    plan = run_by(with_ranks("gpipe", methods=(ClipsMicro(),)).plan, way="interleaved")
    with pytest.raises(InputError, match=r"interleaved passes mix .*expert-exchanges\.run instructions"):
        make_program(MIXTRAL, plan)


@settings(max_examples=25)
@given(st.sampled_from(["gpipe", "1f1b"]), st.sampled_from([2, 4]), st.data())
def test_clipped_segments_wait_for_each_other(schedule: str, samples: int, data: st.DataObject) -> None:
    """Every segment adds to an empty gradient, which is taken behind the last one."""
    plan = run_by(with_ranks(schedule, methods=(ClipsMicro(samples=samples),)).plan, way="instructions")
    program = make_program(MIXTRAL, plan)
    require_valid(program)
    kind, edges = program.columns.kind, program.edges
    ends = (kind[edges.source] == TAKE_GRADIENT) | (kind[edges.target] == TAKE_GRADIENT)
    segments = (kind[edges.source] == BACKWARD_SEGMENT) | (kind[edges.target] == BACKWARD_SEGMENT)
    assert verify(
        without_edge(program, int(data.draw(st.sampled_from(np.flatnonzero(ends & segments).tolist()))))
    )
