"""Plans whose stages have unlike numbers of tensor ranks: they compile, fold, cost, and say so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_plans import divisible, make_plan

from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.optimizers import counted_work
from weft.describe.plan import Choice, Plan
from weft.describe.plan_file import check_plan
from weft.errors import InputError
from weft.moves.layout_of_plan import layout_of, usual_layout_of
from weft.planning.compile import compile_evaluation, compile_folded, compile_part, compile_plan
from weft.planning.planners.base import Candidate, Verdict
from weft.planning.planners.bounds import Bounds, LayerBytes
from weft.planning.planners.simulated import judged
from weft.planning.planners.weft.degrees import DegreeSpace
from weft.planning.planners.weft.planner import WeftPlanner
from weft.planning.planners.weft.stages import Way, deal
from weft.planning.planners.weft.unlike_space import in_orders
from weft.planning.problem import Problem, problem_of
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
    assert plan.words == "pp 2 x dp 1, 1f1b, 2 stages, micro-batch size 2, tensor ranks 2+1"
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


NODES = """
name = "two-and-one"
[[node]]
name = "pair"
count = 1
device = "core"
devices = 2
bandwidth = "5 GB/s"
latency = "100 us"
[[node]]
name = "single"
count = 1
device = "core"
devices = 1
bandwidth = "5 GB/s"
latency = "100 us"
[[link]]
between = ["pair", "single"]
bandwidth = "100 Mbit/s"
latency = "100 us"
[device.core]
memory = "4 GB"
memory_bandwidth = "10 GB/s"
flops = { fp32 = "20 GFLOP/s" }
"""


def problem(path: Path, optimizer: str = "adamw", **pins: Any) -> Problem:
    """A job on a node of two devices and a node of one."""
    path.joinpath("cluster.toml").write_text(NODES)
    on = str(path / "cluster.toml")
    work = counted_work(optimizer).work
    found = problem_of(model="llama-1m", on=on, global_batch=4, precision="fp32", optimizer=work)
    return replace(found, pins=found.pins.replaced(**pins))


def test_a_node_of_one_device_beside_a_node_of_two_takes_a_stage(tmp_path: Path) -> None:
    ranking = WeftPlanner().search(problem(tmp_path))
    best = ranking.fitting[0]
    assert best.plan is not None
    assert sorted(best.plan.tensor_degrees) == [1, 2]
    fastest = min(one.step_s for one in ranking.fitting if one.layout is not None)
    assert best.step_s < fastest


def test_plans_with_unlike_degrees_use_every_device_and_layer(tmp_path: Path) -> None:
    of = problem(tmp_path)
    found = DegreeSpace(of, Bounds(of)).search()
    assert len(found) >= 2
    estimates = [one.estimate_s for one in found]
    assert estimates == sorted(estimates)
    for one in found:
        assert check_plan(one.plan, of.job.graph, of.job.cluster) == []
        assert one.plan.ranks == 3
        assert [plan.schedule.name for plan in in_orders(of, one.plan)] == ["1f1b", "zb-h1"]
        step_s = judged(of, Candidate(verdict=Verdict.PRUNED, reason=""), one.plan).step_s
        assert one.estimate_s == pytest.approx(step_s, rel=0.2)


def test_a_stage_holds_the_bytes_of_its_own_degree() -> None:
    """Six equal layers; in the second stage each has twice as many bytes."""
    memories = [LayerBytes(*(np.full(6, size) for size in (states, 0.0, 0.0, 0.0))) for states in (1.0, 2.0)]
    way, pace = Way([np.ones(6), np.ones(6)], memories), np.array([[0], [1]])
    for room, counts in ((12.0, (3, 3)), (4.0, (4, 2)), (3.0, None)):
        rooms, stages = np.full(2, room), np.arange(2)
        found = deal([way], pace, stages, rooms, np.ones(2), 4, uneven=False)
        assert (None if found is None else found.layers_per_stage) == counts


@pytest.mark.parametrize("pins", [{"tp": 2}, {"pp": 3}, {"dp": 2}, {"schedule": "gpipe"}, {"cp": 2}])
def test_pins_that_no_plan_with_unlike_degrees_keeps_leave_none(tmp_path: Path, pins: dict[str, Any]) -> None:
    of = problem(tmp_path, **pins)
    assert DegreeSpace(of, Bounds(of)).search() == []


def test_a_job_that_refuses_unlike_degrees_has_other_plans(tmp_path: Path) -> None:
    ranking = WeftPlanner().search(problem(tmp_path, "lamb"))
    assert ranking.fitting
    refused = [one for one in ranking.candidates if one.layout is None]
    assert [one.verdict for one in refused] == [Verdict.REFUSED]
    assert "tensor-norms: does not run where stages have unlike numbers of ranks" in refused[0].reason
