"""Plans whose stages have unlike numbers of tensor ranks: they compile, fold, cost, and say so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_plans import divisible, make_plan

from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.plan import Choice, Plan
from weft.describe.plan_file import check_plan
from weft.errors import InputError
from weft.moves.layout_of_plan import layout_of, usual_layout_of
from weft.planning.compile import compile_evaluation, compile_folded, compile_part, compile_plan
from weft.predict.cost.exchanges import stage_exchanges
from weft.predict.cost.placed_plan import CostModel, PlacedPlan
from weft.predict.predict import predict
from weft.program.kinds import SEND_ACTIVATION, SEND_GRADIENT
from weft.program.rank_program import digests
from weft.program.verify import verify

MODEL = replace(divisible("llama", heads=8, sequence=64), layers=4, hidden=64, key_value_heads=8)
GRAPH = layer_graph(MODEL)


def planned(*degrees: int, dp: int = 1, copies: tuple[int, ...] = (), micro_batches: int = 8) -> Plan:
    plan = make_plan(
        MODEL,
        schedule="1f1b",
        pp=len(degrees),
        dp=dp,
        micro_batches=micro_batches,
        precision="fp32",
        degrees=degrees,
        copies=copies,
    )
    cluster = parse_cluster(f"{plan.ranks}xa100-80gb")
    return plan.model_copy(update={"cluster": cluster.name, "cluster_fingerprint": cluster.fingerprint})


@pytest.mark.parametrize(
    ("degrees", "dp", "copies"),
    [((1, 2), 1, ()), ((2, 1), 2, ()), ((1, 2, 1), 2, ()), ((1, 2), 1, (2, 1)), ((2, 1), 2, (1, 2))],
)
def test_the_prediction_of_one_pipeline_stands_for_all(
    degrees: tuple[int, ...], dp: int, copies: tuple[int, ...]
) -> None:
    plan = planned(*degrees, dp=dp, copies=copies)
    cluster = parse_cluster(f"{plan.ranks}xa100-80gb")
    model = CostModel(graph=GRAPH, cluster=cluster)
    assert check_plan(plan, GRAPH, cluster) == []
    whole, folded = compile_plan(plan, GRAPH), compile_folded(plan, GRAPH, cluster)
    assert verify(whole) == verify(compile_evaluation(plan, GRAPH)) == []
    assert len(folded) == len(whole) // dp
    found, expected = (predict(model, plan, program).prediction for program in (folded, whole))
    assert found.step_s == pytest.approx(expected.step_s, rel=1e-12)
    assert found.peak_bytes == expected.peak_bytes
    assert [compile_part(plan, GRAPH, rank).digest for rank in range(plan.ranks)] == digests(whole).tolist()


def test_a_message_has_the_tokens_of_its_receiver() -> None:
    columns = compile_plan(planned(2, 4, 1), GRAPH).columns
    stream_bytes = 2 * MODEL.sequence * MODEL.hidden * 4
    sizes = {
        (kind, stage, part): int(columns.bytes[rows].max())
        for kind in (SEND_ACTIVATION, SEND_GRADIENT)
        for stage in range(3)
        for part in range(3)
        if (rows := (columns.kind == kind) & (columns.stage == stage) & (columns.part == part)).any()
    }
    assert sizes == {
        (SEND_ACTIVATION, 0, 1): stream_bytes // 4,
        (SEND_ACTIVATION, 1, 2): stream_bytes,
        (SEND_GRADIENT, 2, 1): stream_bytes // 4,
        (SEND_GRADIENT, 1, 0): stream_bytes // 2,
    }


def test_ranks_that_gather_tokens_for_a_stage_with_fewer_spend_time() -> None:
    def passes_s(*degrees: int) -> list[tuple[float, float]]:
        plan = planned(*degrees)
        model = CostModel(graph=GRAPH, cluster=parse_cluster(f"{plan.ranks}xa100-80gb"))
        placed = PlacedPlan(program=compile_plan(plan, GRAPH), plan=plan, model=model)
        found = stage_exchanges(plan, GRAPH, model.network, placed.ranks_of_stage)
        return [
            (found[stage].exchanges[0].forward_s, found[stage].exchanges[0].backward_s) for stage in found
        ]

    ((alone, back),) = passes_s(2)
    assert alone == back
    # A value that leaves forward is gathered forward; the gradient of one that has entered, backward.
    (forward_s, backward_s), *_ = passes_s(2, 1)
    even = passes_s(2, 2)
    assert forward_s > even[0][0]
    assert backward_s == even[0][1]
    (entered_s, returned_s), *_ = passes_s(1, 2)
    assert entered_s == even[1][0]
    assert returned_s > even[1][1]


def test_a_plan_says_its_tensor_ranks_and_is_no_layout() -> None:
    plan = planned(2, 1)
    assert plan.words == "dp 1 x pp 3, 1f1b, 2 stages, micro-batch size 2, tensor ranks 2+1"
    assert "tensor ranks" not in planned(2, 2).words
    assert plan.pp == 2
    with pytest.raises(InputError, match="differ in number, share or width"):
        layout_of(plan)
    usual = usual_layout_of(plan)
    assert (usual.pp, usual.tp, usual.loops) == (2, 1, 1)


def test_another_synchronisation_than_dense_is_refused() -> None:
    plan = planned(2, 1).model_copy(update={"sync": Choice(name="power-sgd")})
    found = [str(one) for one in check_plan(plan, GRAPH, parse_cluster("3xa100-80gb"))]
    assert "plan: sync: 'power-sgd' needs equally many tensor ranks of every stage, not 2, 1" in found[0]
