"""Laws: every piece goes both ways before its reduction; prices, memory, facts and refusals follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from predict.cost.machines import cluster
from program.mutations import without_edge, without_row
from program.rendezvous import stuck_rows
from small_plans import make_plan, make_program, tiny

from weft.bundles import bundles, parts_of
from weft.describe.cluster import Cluster, Link
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.models import resolve_model
from weft.describe.plan import Choice, Plan
from weft.describe.plan_file import PlanRule
from weft.describe.reading import parse_toml
from weft.describe.run_file import parse_run
from weft.describe.synchronisation import sent_share_of
from weft.errors import InputError
from weft.methods.clan.kinds import AGGREGATE, COMPRESS, DECOMPRESS, EXCHANGE, PULL, PUSH
from weft.methods.clan.options import CODECS, NAME, ClanOptions, PiecePlace
from weft.methods.clan.pieces import PiecedStages, compressed_elements
from weft.methods.clan.report import REPORT
from weft.methods.sharding.kinds import REDUCE
from weft.moves.composition import Composition
from weft.planning.compile import compile_evaluation, compile_folded
from weft.planning.job_rules import refused_by_methods
from weft.planning.planned import plan_run
from weft.planning.sync_comparison import sync_figures
from weft.predict.cost.memory import own_parameters, with_slack
from weft.predict.cost.placed_plan import CostModel, PlacedPlan
from weft.predict.cost.price import price, price_placed
from weft.predict.predict import predict
from weft.program.kinds import MAKES_GRADIENTS
from weft.program.program import Program
from weft.program.verify import verify

BUNDLE = bundles()[NAME]
CONFIG = tiny(layers=2)
GRAPH = layer_graph(CONFIG)
ORDERS = [("gpipe", 1, 1), ("1f1b", 2, 1), ("breadth-first", 1, 2), ("zb-h1", 2, 1), ("chimera", 2, 1)]
SMALL = {"block": 32, "minimum_bytes": 512, "piece_bytes": 4096}


def compressed(*order: str | int, dp: int = 2, **options: object) -> Plan:
    schedule, pp, loops = order or ORDERS[0]
    plan = make_plan(CONFIG, pp=pp, dp=dp, loops=loops, schedule=schedule, precision="bf16")
    return plan.model_copy(update={"sync": Choice(name=NAME, options={**SMALL, **options})})


def dense(plan: Plan) -> Plan:
    return plan.model_copy(update={"sync": Choice(name="dense")})


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("piece_bytes", [1500, 10**6])
def test_every_piece_goes_both_ways_between_backward_passes_and_their_reduction(
    order: tuple[str, int, int], piece_bytes: int
) -> None:
    plan = compressed(*order, piece_bytes=piece_bytes)
    program = make_program(CONFIG, plan)
    assert verify(program) == []
    assert not stuck_rows(program)
    columns, edges, stages = program.columns, program.edges, PiecedStages.of(plan, GRAPH)
    assert stages is not None
    follow = set(zip(edges.source.tolist(), edges.target.tolist(), strict=True))
    reductions = np.flatnonzero(columns.kind == REDUCE)
    assert len(reductions)
    for row in reductions.tolist():
        stage, rank = int(columns.stage[row]), int(columns.rank[row])
        mine = (columns.stage == stage) & (columns.rank == rank)
        makers = {int(one) for one in edges.source[edges.target == row]}
        makers = {one for one in makers if columns.kind[one] in MAKES_GRADIENTS}
        whole = 0
        for part in range(stages.pieces[stage]):
            rows = [
                int(np.flatnonzero(mine & (columns.kind == kind) & (columns.part == part))[0])
                for kind in EXCHANGE
            ]
            assert all(pair in follow for pair in zip(rows, [*rows[1:], row], strict=True))
            assert makers
            assert all((one, rows[0]) in follow for one in makers)
            whole += int(columns.bytes[rows[0]])
        assert whole == stages.piece_bytes[stage]
        assert (mine & (columns.kind == COMPRESS)).sum() == stages.pieces[stage]


@pytest.mark.parametrize("order", ORDERS)
def test_pieces_precede_reductions_that_wait_for_all_backward_passes(order: tuple[str, int, int]) -> None:
    plan = compressed(*order).model_copy(update={"blocking": ("reductions",)})
    program = make_program(CONFIG, plan)
    assert verify(program) == []
    assert not stuck_rows(program)


def test_a_piece_is_on_the_way_while_the_next_is_encoded() -> None:
    plan = compressed(piece_bytes=4096)
    model = CostModel(graph=GRAPH, cluster=joined_by(1e5, 0.0))
    timeline = predict(model, plan, make_program(CONFIG, plan)).simulation.timeline
    mine = (timeline.rank == 0) & (timeline.step == 0)
    begin = timeline.start_ns[mine & (timeline.kind == PUSH)].min()
    end = timeline.end_ns[mine & (timeline.kind == PUSH)].min()
    codecs = mine & np.isin(timeline.kind, [COMPRESS, AGGREGATE, DECOMPRESS])
    assert ((timeline.start_ns[codecs] >= begin) & (timeline.end_ns[codecs] <= end)).any()


def test_an_evaluation_exchanges_nothing() -> None:
    program = compile_evaluation(compressed(), GRAPH)
    assert verify(program) == []
    assert not np.isin(program.columns.kind, EXCHANGE).any()


def _first(program: Program, kind: int) -> int:
    return int(np.flatnonzero(program.columns.kind == kind)[0])


def _changed(program: Program, kind: int, **to: int) -> Program:
    """The first row of a kind with other values in its columns."""
    row, columns = _first(program, kind), {}
    for name, value in to.items():
        columns[name] = getattr(program.columns, name).copy()
        columns[name][row] = value
    return replace(program, columns=replace(program.columns, **columns))


def _with_others(program: Program) -> Program:
    group = np.where(program.columns.kind == PULL, len(program.groups), program.columns.group)
    groups = (*program.groups, (0, 1))
    return replace(program, columns=replace(program.columns, group=group), groups=groups)


def _unrelated(program: Program, kind: int) -> Program:
    row = _first(program, kind)
    return without_edge(program, int(np.flatnonzero(program.edges.source == row)[0]))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        *((lambda program, kind=kind: without_row(program, _first(program, kind)), "") for kind in EXCHANGE),
        *((lambda program, kind=kind: _unrelated(program, kind), "") for kind in EXCHANGE),
        (lambda program: _changed(program, PUSH, bytes=8, most_bytes=8), "other bytes than the rest"),
        (lambda program: _changed(program, COMPRESS, part=99), "piece that its stage does not have"),
        (_with_others, "not with the replicas of its reduction"),
    ],
)
def test_a_program_that_exchanges_otherwise_is_refused(
    broken: Callable[[Program], Program], said: str
) -> None:
    found = verify(broken(make_program(CONFIG, compressed(dp=4))))
    assert found
    assert said in "; ".join(str(one) for one in found)


def joined_by(bytes_per_s: float, latency_s: float) -> Cluster:
    """Two nodes of one device."""
    link = Link(bytes_per_s, latency_s)
    return replace(cluster(nodes=2, devices=1), links={("node", "node"): link})


def ticks(where: Cluster, plan: Plan, *kinds: int) -> float:
    """The time of one rank's rows of these kinds."""
    program = make_program(CONFIG, plan)
    costs = price(CostModel(graph=GRAPH, cluster=where), program, plan).costs
    rows = np.isin(program.columns.kind, kinds) & (program.columns.rank == 0)
    return float(costs.occupancy[rows].sum())


@pytest.mark.parametrize("codec", CODECS)
def test_exchanges_take_the_time_of_their_payloads(codec: str) -> None:
    plan, slow = compressed(codec=codec, ratio=8.0), joined_by(1e3, 0.0)
    options = ClanOptions.model_validate(dict(plan.sync.options))
    large, own = compressed_elements(options, plan, GRAPH, 0), parameters()
    whole = ticks(slow, dense(plan), REDUCE)
    sent = options.block_bytes / (4 * options.block)
    assert 0.5 < large / own < 1.0
    assert ticks(slow, plan, PUSH, PULL) == pytest.approx(whole * sent * large / own, rel=0.01)
    assert ticks(slow, plan, REDUCE) == pytest.approx(whole * (1.0 - large / own), rel=0.01)
    assert sent_share_of(plan, GRAPH, 0) == pytest.approx(1.0 - large / own)


def parameters() -> int:
    plan = compressed()
    return own_parameters(GRAPH, plan.stages[0].layers, plan.shape(0))


def test_a_piece_with_a_codec_of_its_own_takes_the_time_of_that_codec() -> None:
    where, mixed = joined_by(1e3, 0.0), compressed(piece_codecs="0.2 fp32, 0.0 scaled-sign")

    def each(plan: Plan) -> dict[tuple[int, int], int]:
        program = make_program(CONFIG, plan)
        costs, columns = price(CostModel(graph=GRAPH, cluster=where), program, plan).costs, program.columns
        rows = np.flatnonzero(np.isin(columns.kind, EXCHANGE) & (columns.rank == 1)).tolist()
        return {(int(columns.kind[row]), int(columns.part[row])): int(costs.occupancy[row]) for row in rows}

    found, of_codec = each(mixed), {0: "scaled-sign", 2: "fp32"}
    alone = {codec: each(compressed(codec=codec, ratio=8.0)) for codec in CODECS}
    assert len(found) > 3 * len(EXCHANGE)
    for (kind, part), took in found.items():
        assert took == alone[of_codec.get(part, "linear-dithering")][kind, part]
    model = CostModel(graph=GRAPH, cluster=where)
    sent = {one: sync_figures(model, plan).traffic.between_bytes for one, plan in PLANS.items()}
    assert sent["coarse"] < sent["mixed"] < sent["fine"]


PLANS = {
    "coarse": compressed(codec="scaled-sign"),
    "mixed": compressed(codec="scaled-sign", piece_codecs="0.2 fp32"),
    "fine": compressed(codec="fp32"),
}


def test_a_codec_for_a_piece_that_no_stage_has_is_refused() -> None:
    program = compressed(piece_codecs="0.1 fp32, 0.99 fp32, 7.0 fp16")
    with pytest.raises(InputError, match=r"sync.piece_codecs: stage 0, piece 99 is none of") as refused:
        make_program(CONFIG, program)
    assert len(refused.value.violations) == 2


@pytest.mark.parametrize("errors", ["by codec", "kept", "dropped"])
def test_another_codec_for_a_piece_keeps_the_others_and_all_errors(errors: str) -> None:
    options = ClanOptions.model_validate({"codec": "top-k", "piece_codecs": "1.2 fp16", "errors": errors})
    keys = options.with_piece(PiecePlace(0, 1), "fp32")
    changed = ClanOptions.model_validate(options.model_dump() | keys)
    assert changed.codec_of_piece == {PiecePlace(0, 1): "fp32", PiecePlace(1, 2): "fp16"}
    assert changed.keeps_errors == options.keeps_errors
    back = ClanOptions.model_validate(changed.model_dump() | changed.with_piece(PiecePlace(0, 1), "top-k"))
    assert back.codec_of_piece == options.codec_of_piece
    # Its last biased codec goes, and its errors stay.
    last = ClanOptions.model_validate({"piece_codecs": "0.1 top-k", "errors": errors})
    fine = ClanOptions.model_validate(last.model_dump() | last.with_piece(PiecePlace(0, 1), "fp32"))
    assert fine.keeps_errors == last.keeps_errors
    # A piece with a biased codec has errors, so all pieces keep them.
    plain = ClanOptions.model_validate({"piece_codecs": "0.1 scaled-sign"})
    assert plain.keeps_errors


def test_smaller_parameters_than_the_least_are_sent_whole() -> None:
    plan = compressed(minimum_bytes=10**6)
    assert sent_share_of(plan, GRAPH, 0) == 1.0
    assert ticks(joined_by(1e3, 0.0), plan, PUSH, PULL) == ticks(joined_by(1e12, 0.0), plan, PUSH, PULL)


@pytest.mark.parametrize("bits", [8, 7])
def test_codecs_take_multiples_of_the_time_of_the_quantiser(bits: int) -> None:
    where = joined_by(1e9, 0.0)
    plan, other = compressed(bits=bits), compressed(codec="scaled-sign")
    for kind, name in ((COMPRESS, "compress"), (AGGREGATE, "aggregate"), (DECOMPRESS, "decompress")):
        times = [ClanOptions.model_validate(dict(one.sync.options)).times for one in (plan, other)]
        ratio = getattr(times[0], name) / getattr(times[1], name)
        assert ticks(where, plan, kind) == pytest.approx(ratio * ticks(where, other, kind), rel=0.02, abs=20)
    assert ticks(where, plan, COMPRESS) > ticks(where, compressed(bits=4), COMPRESS) * (
        2.9 if bits == 7 else 0.9
    )


def test_the_comparison_of_methods_counts_bytes_and_codecs() -> None:
    model, plan = CostModel(graph=GRAPH, cluster=joined_by(1e6, 0.0)), compressed(codec="scaled-sign")
    found, whole = (sync_figures(model, one) for one in (plan, dense(plan)))
    assert 0.0 < found.traffic.between_bytes < 0.6 * whole.traffic.between_bytes
    assert found.codecs.busy_s > 0.0
    assert found.added_bytes > 0


def test_a_folded_program_is_priced_like_the_whole() -> None:
    where, plan = joined_by(1e6, 1e-5), compressed()
    model = CostModel(graph=GRAPH, cluster=where)
    whole = predict(model, plan, make_program(CONFIG, plan)).prediction
    folded = predict(model, plan, compile_folded(plan, GRAPH, where)).prediction
    assert folded.step_s == pytest.approx(whole.step_s, rel=1e-6)
    assert folded.peak_bytes == whole.peak_bytes


@pytest.mark.parametrize(("codec", "kept"), [("scaled-sign", True), ("linear-dithering", False)])
def test_a_rank_keeps_an_error_for_each_gradient_and_for_the_sums_that_it_owns(
    codec: str, kept: bool
) -> None:
    where, plan = joined_by(1e9, 0.0), compressed(codec=codec)
    options = ClanOptions.model_validate(dict(plan.sync.options))
    owned = -(-compressed_elements(options, plan, GRAPH, 0) // 2)
    held = []
    for one in (dense(plan), plan):
        program = make_program(CONFIG, one)
        placed = PlacedPlan(program=program, plan=one, model=CostModel(graph=GRAPH, cluster=where))
        held.append(price_placed(placed, program).costs.base_bytes)
    added = 4 * (parameters() + owned) if kept else 0
    assert np.abs(held[1] - held[0] - with_slack(np.array(added))).max() <= 1


LAYOUT = Layout(pp=1, dp=8, loops=1, micro_batch_size=1, schedule="1f1b", sync=NAME)


@pytest.mark.parametrize(
    ("changes", "precision", "options", "expected"),
    [
        ({}, "bf16", {"codec": "top-k"}, None),
        ({}, "fp16", {}, None),
        ({"dp": 1}, "fp32", {}, "one replica sends nothing; nearest sync.method: dense"),
        (
            {"sharding": "zero-1"},
            "fp32",
            {},
            "all replicas pull all gradients, and zero-1 wants shares of them only; nearest sharding: zero-0",
        ),
        (
            {},
            "fp16",
            {"codec": "scaled-sign"},
            "errors have the scale of earlier losses, and fp16 changes it; nearest precision: bf16",
        ),
    ],
)
def test_layouts_and_plans_that_cannot_compress_both_ways_are_refused(
    changes: dict[str, Any], precision: str, options: dict[str, Any], expected: str | None
) -> None:
    where, layout = cluster(nodes=8, devices=1), replace(LAYOUT, **changes, sync_options=options)
    job = Job(graph=GRAPH, cluster=where, global_batch=8, sequence=GRAPH.sequence, precision=precision)
    composition, *_ = parts_of(Composition, [BUNDLE])
    reason = None if expected is None else f"{NAME}: {expected}"
    assert composition.refuse(job, layout) == reason
    (rule,) = parts_of(PlanRule, [BUNDLE])
    plan = make_plan(CONFIG, dp=layout.dp, precision=precision)
    update = {"sharding": layout.sharding, "sync": Choice(name=NAME, options=options)}
    found = [str(one) for one in rule.refuse(plan.model_copy(update=update), GRAPH)]
    assert len(found) == (expected is not None)
    assert all(expected.split("; nearest")[0] in one for one in found)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ratio", 0.5),
        ("bits", 9),
        ("block", 48),
        ("codec", '"sign"'),
        ("value_bits", 8),
        ("piece_bytes", 0),
        ("piece_bytes", 4 * 4096 - 1),
        ("piece_bytes", "127\nblock = 32"),
        ("ratio", '4097.0\ncodec = "random-k"'),
        ("ratio", '4097.0\npiece_codecs = "0.1 top-k"'),
        ("piece_codecs", '"0.1 fp8"'),
        ("piece_codecs", '"1 fp16"'),
        ("piece_codecs", '"0.1 fp16, 0.1 fp32"'),
    ],
)
def test_a_run_file_with_a_wrong_key_is_refused_in_one_line(key: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"sync: {key}: ") as refused:
        parse_run(parse_toml(RUN + f"{key} = {value}\n", "run.toml"))
    assert len(refused.value.violations) == 1


@pytest.mark.parametrize(
    ("keys", "unread"),
    [
        ("ratio = 10", ["ratio"]),
        ("value_bits = 16\nbits = 4", ["value_bits"]),
        ('codec = "top-k"\nratio = 10\nbits = 4', ["bits"]),
        ('ratio = 10\npiece_codecs = "0.1 top-k"', []),
        ("ratio = 10\nchange_codec_every = 50", []),
    ],
)
def test_a_key_that_no_codec_reads_is_refused_before_the_start(keys: str, unread: list[str]) -> None:
    planned = plan_run(parse_run(parse_toml(f"{RUN}{keys}\n", "run.toml")))
    found = [one.where for one in refused_by_methods(planned) if "does not read it" in one.problem]
    assert found == [f"sync.{key}" for key in unread]


RUN = (
    '[model]\npreset = "gpt2"\n[train]\nglobal_batch = 32\n[cluster]\nuse = "16xa100-80gb"\n'
    '[goal]\ncontract = "empirical"\n[plan]\ndp = 16\nloops = 1\n[sync]\nmethod = "clan"\n'
)


def test_a_search_names_the_piece_that_no_layout_has_and_no_reason_twice() -> None:
    with pytest.raises(InputError, match=r"sync.piece_codecs: stage 0, piece 9999 is none of") as refused:
        plan_run(parse_run(parse_toml(RUN + 'piece_codecs = "0.9999 fp32"\n', "run.toml")))
    reasons = [one.problem for one in refused.value.violations]
    assert "piece 9999" in reasons[0]
    assert len(set(reasons)) == len(reasons)


def test_a_run_file_chooses_codec_and_pieces() -> None:
    planned = plan_run(parse_run(parse_toml(RUN + 'codec = "top-k"\nratio = 500\n', "run.toml")))
    assert planned.plan.sync == Choice(name=NAME, options={"codec": "top-k", "ratio": 500})
    assert planned.plan.sharding == "zero-0"
    stages = PiecedStages.of(planned.plan, layer_graph(resolve_model("gpt2")))
    assert stages is not None
    # GPT-2 has 124 million parameters, nearly all of them in large matrices.
    assert stages.pieces == (-(-stages.piece_bytes[0] // 4_096_000),)
    assert stages.piece_bytes[0] == pytest.approx(4 * 124e6, rel=0.01)


def test_the_report_tells_what_codecs_leave_out() -> None:
    planned = plan_run(parse_run(parse_toml(RUN + 'codec = "scaled-sign"\n', "run.toml")))
    metrics = [
        {"step": step, "contraction_of_stage_0": 0.25 + 0.01 * step, "kept_errors_of_stage_0": 1.5}
        for step in range(3)
    ]
    section, *_ = REPORT
    rows = dict(section.rows(planned, metrics))
    assert rows["codec"] == "scaled-sign"
    assert rows["bits of a gradient"] == "1.01"
    assert rows["left out of stage 0, of the square"].startswith("0.26")
    assert rows["relative error of stage 0"].startswith("0.51")
    assert rows["kept errors of stage 0, of the gradient's norm"].startswith("1.5, middle step")
    chart = section.chart(planned, metrics)
    assert chart is not None
    assert chart.curves[0].points == [(0, 0.25), (1, 0.26), (2, 0.27)]
    # Another method has no such section.
    assert not section.rows(
        plan_run(parse_run(parse_toml(RUN.replace("clan", "dense"), "run.toml"))), metrics
    )
