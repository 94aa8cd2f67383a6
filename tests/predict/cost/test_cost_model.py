"""Prices do not depend on what was priced before, nor with what they are shared."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from predict.cost.machines import BETWEEN, CPU, GPU, INSIDE, MACHINE, MODEL, cluster, profile_of
from predict.plans import plan_of

from weft.describe.cluster import Cluster, NodeGroup
from weft.describe.families import layer_graph
from weft.describe.plan import Plan
from weft.planning.compile import compile_folded, pipeline_layout
from weft.planning.long_steps import predict_long
from weft.predict.cost.placed_plan import CostModel, PlacedPlan
from weft.predict.cost.price import Priced, price, price_placed

GRAPH = layer_graph(MODEL)
SLOW = replace(GPU, name="slow", flops_per_s={"bf16": 100e12, "fp32": 7e12})
MIXED = Cluster(
    name="mixed",
    groups=(
        NodeGroup(name="a", count=1, device=GPU, devices=4, link=INSIDE, speeds=(1.0, 0.5, 1.0, 1.0)),
        NodeGroup(name="b", count=2, device=SLOW, devices=4, link=INSIDE),
    ),
    links={("a", "b"): BETWEEN, ("b", "b"): BETWEEN},
)
MODELS = (
    CostModel(graph=GRAPH, cluster=cluster(nodes=3)),
    CostModel(graph=GRAPH, cluster=MIXED),
    CostModel(graph=GRAPH, cluster=cluster(nodes=3, device=CPU), machine=MACHINE, profile=profile_of(GRAPH)),
)
shapes = st.fixed_dictionaries(
    {
        "pp": st.integers(1, 2),
        "dp": st.integers(1, 3),
        "tp": st.integers(1, 2),
        "loops": st.integers(1, 2),
        "micro_batches": st.sampled_from([4, 6, 70]),
        "micro_batch_size": st.integers(1, 2),
    }
)
choices = st.fixed_dictionaries(
    {
        "sharding": st.sampled_from(["zero-0", "zero-1", "zero-3"]),
        "recompute": st.sampled_from(["none", "full", "selective"]),
    }
)


def planned(model: CostModel, shape: dict[str, Any], choice: dict[str, Any]) -> Plan:
    if model.profile is not None:
        shape = {**shape, "tp": 1}
    schedule = "1f1b" if shape["loops"] == 1 or shape["pp"] == 1 else "breadth-first"
    loops = shape["loops"] if shape["pp"] > 1 else 1
    plan = plan_of(GRAPH, model.cluster, **{**shape, "loops": loops}, schedule=schedule)
    stages = tuple(one.model_copy(update={"recompute": choice["recompute"]}) for one in plan.stages)
    sharding = choice["sharding"] if shape["dp"] > 1 else "zero-0"
    return plan.model_copy(update={"stages": stages, "sharding": sharding})


def alone(model: CostModel) -> dict[str, Any]:
    return {"machine": model.machine, "profile": model.profile}


def assert_same(one: Priced, other: Priced) -> None:
    for field in fields(one.costs):
        mine, others = getattr(one.costs, field.name), getattr(other.costs, field.name)
        same = np.array_equal(mine, others) if isinstance(mine, np.ndarray) else mine == others
        assert same, field.name
    assert (one.low_scale, one.high_scale, one.source) == (other.low_scale, other.high_scale, other.source)


@settings(max_examples=15)
@given(st.sampled_from(MODELS), shapes, choices)
def test_a_shared_cost_model_prices_as_one_of_its_own(
    model: CostModel, shape: dict[str, Any], choice: dict[str, Any]
) -> None:
    """The models of this module have priced all plans of the examples before."""
    plan = planned(model, shape, choice)
    own = predict_long(CostModel(graph=model.graph, cluster=model.cluster, **alone(model)), plan)
    assert predict_long(model, plan) == own


@settings(max_examples=15)
@given(st.sampled_from(MODELS), shapes, choices, st.integers(1, 5))
def test_programs_of_other_lengths_are_priced_with_the_same_tables(
    model: CostModel, shape: dict[str, Any], choice: dict[str, Any], rounds: int
) -> None:
    plan, length = planned(model, {**shape, "micro_batches": 4}, choice), rounds * shape["pp"]
    whole = pipeline_layout(plan, model.graph)
    first, other = (
        compile_folded(plan, model.graph, model.cluster, one) for one in (whole, whole.of_length(length))
    )
    assert_same(
        price_placed(PlacedPlan(program=first, plan=plan, model=model), other),
        price(CostModel(graph=model.graph, cluster=model.cluster, **alone(model)), other, plan),
    )
