from __future__ import annotations

from dataclasses import replace

import pytest
from predict.cost.machines import MODEL
from predict.plans import plan_of

from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.plan import Choice
from weft.planning.compile import compile_plan
from weft.predict.cost.placed_plan import CostModel, PlacedPlan
from weft.predict.memory_parts import memory_parts, reserve_part
from weft.predict.predict import predict

GRAPH = layer_graph(MODEL)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "breadth-first", "zb-h1"])
@pytest.mark.parametrize("sharding", ["zero-0", "zero-2"])
@pytest.mark.parametrize("offloads", [False, True])
def test_parts_add_up_to_the_peak_and_to_its_interval(schedule: str, sharding: str, offloads: bool) -> None:
    where = parse_cluster("4xa100-80gb")
    if sharding == "zero-2" and schedule != "breadth-first":
        sharding = "zero-1"
    plan = plan_of(GRAPH, where, pp=2, dp=2, schedule=schedule).model_copy(update={"sharding": sharding})
    if offloads:
        states = Choice(name="offload", options={"states": True})
        plan = plan.model_copy(update={"methods": (*plan.methods, states)})
    model = CostModel(graph=GRAPH, cluster=where)
    program = compile_plan(plan, GRAPH)
    step = predict(model, plan, program)
    placed = PlacedPlan(program=program, plan=plan, model=model)
    for rank, (peak, high) in enumerate(
        zip(step.prediction.peak_bytes, step.prediction.peak_high_bytes, strict=True)
    ):
        parts = memory_parts(placed, program, step, rank)
        assert sum(one.value for one in parts) == pytest.approx(peak, rel=1e-6)
        half_width = 1.03 * sum(one.spread * one.value for one in parts)
        assert half_width == pytest.approx(high - peak, rel=1e-3)
        names = [one.name for one in parts]
        assert len(set(names)) == len(names)
        assert {"optimizer states", "weights", "gradients", "activations"} <= set(names)


def test_the_reserve_is_assumed_unless_a_cluster_states_it() -> None:
    device = parse_cluster("1xa100-80gb").groups[0].device
    assert reserve_part(device).source == "assumed"
    stated = replace(device, reserve_bytes=2**30)
    assert reserve_part(stated) == ("reserve", 2**30, 0.0, "given")
    assert stated.usable_bytes == stated.memory_bytes - 2**30
