"""Plans whose stages have unlike numbers of replicas: they compile, fold, and say so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_plans import divisible, make_plan

from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.plan import Choice, Plan, Replica
from weft.describe.plan_file import check_plan
from weft.errors import InputError
from weft.planning.compile import compile_evaluation, compile_folded, compile_part, compile_plan
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import predict
from weft.program.rank_program import digests
from weft.program.verify import verify

MODEL = replace(divisible("gpt"), layers=4)
GRAPH = layer_graph(MODEL)


def planned(*copies: int, dp: int = 1, tp: int = 1, micro_batches: int = 8) -> Plan:
    """A plan in 1F1B order; `copies` are the replicas of each stage in each of the `dp` pipelines."""
    plan = make_plan(
        MODEL,
        schedule="1f1b",
        pp=len(copies),
        dp=dp,
        micro_batches=micro_batches,
        precision="fp32",
        copies=copies,
    )
    cluster = parse_cluster(f"{plan.ranks * tp}xa100-80gb")
    stages = tuple(
        stage.model_copy(
            update={
                "replicas": tuple(
                    Replica(
                        ranks=tuple(tp * copy.ranks[0] + lane for lane in range(tp)),
                        micro_batches=copy.micro_batches,
                    )
                    for copy in stage.replicas
                )
            }
        )
        for stage in plan.stages
    )
    named = {"cluster": cluster.name, "cluster_fingerprint": cluster.fingerprint}
    return plan.model_copy(update={"stages": stages, "mesh": {**plan.mesh, "tp": tp}, **named})


@pytest.mark.parametrize(
    ("copies", "dp", "tp"), [((2, 1), 2, 1), ((1, 2, 1), 1, 2), ((1, 2, 1), 2, 1), ((2, 3), 1, 1)]
)
def test_the_prediction_of_one_pipeline_stands_for_all(copies: tuple[int, ...], dp: int, tp: int) -> None:
    plan = planned(*copies, dp=dp, tp=tp, micro_batches=12)
    cluster = parse_cluster(f"{plan.ranks}xa100-80gb")
    model = CostModel(graph=GRAPH, cluster=cluster)
    assert check_plan(plan, GRAPH, cluster) == []
    whole, folded = compile_plan(plan, GRAPH), compile_folded(plan, GRAPH, cluster)
    assert verify(whole) == verify(compile_evaluation(plan, GRAPH)) == []
    assert len(folded) == len(whole) // (dp * tp)
    found, expected = (predict(model, plan, program).prediction for program in (folded, whole))
    assert found.step_s == pytest.approx(expected.step_s, rel=1e-12)
    assert found.peak_bytes == expected.peak_bytes
    assert [compile_part(plan, GRAPH, rank).digest for rank in range(plan.ranks)] == digests(whole).tolist()


def test_more_replicas_of_the_slow_stage_take_less_time() -> None:
    def step_s(*copies: int) -> float:
        plan = planned(*copies, micro_batches=24)
        stages = [one.model_copy(update={"layers": own}) for one, own in zip(plan.stages, cut, strict=True)]
        plan = plan.model_copy(update={"stages": tuple(stages)})
        cluster = parse_cluster(f"{plan.ranks}xa100-80gb")
        return predict(
            CostModel(graph=GRAPH, cluster=cluster), plan, compile_plan(plan, GRAPH)
        ).prediction.step_s

    cut = (0,), (1, 2, 3, 4, 5)
    assert step_s(1, 1) > step_s(1, 2) > step_s(1, 3)


def test_a_plan_says_its_replicas() -> None:
    assert planned(2, 1).words == "dp 1 x pp 3 x tp 1, 1f1b, 2 stages, micro-batch size 2, replicas 2+1"
    assert "replicas" not in planned(2, 2).words


def test_shares_that_form_no_pipelines_are_refused() -> None:
    plan = planned(2, 1)
    first = plan.stages[0]
    shares = [
        one.model_copy(update={"micro_batches": count})
        for one, count in zip(first.replicas, (3, 5), strict=True)
    ]
    unlike = plan.model_copy(
        update={"stages": (first.model_copy(update={"replicas": tuple(shares)}), *plan.stages[1:])}
    )
    with pytest.raises(InputError, match="unequal shares of the batch, where stages have unlike numbers"):
        compile_plan(unlike, GRAPH)


def test_another_synchronisation_than_dense_is_refused() -> None:
    plan = planned(2, 1).model_copy(update={"sync": Choice(name="power-sgd")})
    found = [str(one) for one in check_plan(plan, GRAPH, parse_cluster("3xa100-80gb"))]
    assert "plan: sync: 'power-sgd' needs equally many replicas of every stage, not 2, 1" in found[0]
