"""The time of unequal experts: a step whose layers wait for their busiest expert rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf
from typing import Any

from weft.describe.families.transformer import transposed_input, transposed_weight
from weft.describe.layer import Layer, Matmul, PassWork
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Choice, Plan
from weft.methods.expert_balance.options import NAME, options_of
from weft.planning.long_steps import predict_long
from weft.planning.planned_job import PlannedJob
from weft.predict.cost.placed_plan import PlacedPlan
from weft.predict.cost.price import Priced, price_placed
from weft.program.program import Program


def _as_equal(plan: Plan) -> Plan:
    """Return the plan without expectations of its experts' tokens."""

    def options(choice: Choice) -> dict[str, Any]:
        return {name: one for name, one in choice.options.items() if name not in ("variation", "capacity")}

    methods = [
        one.model_copy(update={"options": options(one)}) if one.name == NAME else one for one in plan.methods
    ]
    return plan.model_copy(update={"methods": tuple(methods)})


def step_with(planned: PlannedJob, busiest: Mapping[int, float]) -> float:
    """Return the predicted seconds of a step whose layers have unequal experts.

    Args:
        busiest: by position of the layer, the tokens of the busiest expert rank over the mean. A capacity
            limits them.
    """
    table = options_of(planned.plan)
    most = inf if table is None or table.capacity is None else table.capacity
    factors = {place: min(factor, most) for place, factor in busiest.items()}

    def price(placed: PlacedPlan, program: Program) -> Priced:
        graph = with_busiest(placed.model.graph, factors)
        return price_placed(replace(placed, model=replace(placed.model, graph=graph)), program)

    return predict_long(planned.problem.cost_model, _as_equal(planned.plan), price).prediction.step_s


def with_busiest(graph: LayerGraph, busiest: Mapping[int, float]) -> LayerGraph:
    """Return the layers as the busiest expert rank of each computes, keeps and exchanges."""
    layers = list(graph.layers)
    # Equal layers with equal factors stay equal.
    made: dict[tuple[int, float], Layer] = {}
    for place, factor in busiest.items():
        key = graph.alike[place], factor
        if key not in made:
            made[key] = _with_rows(layers[place], factor)
        layers[place] = replace(made[key], name=layers[place].name)
    return replace(graph, layers=tuple(layers), model=graph.model or graph)


def _with_rows(layer: Layer, factor: float) -> Layer:
    """Return a layer with this many times the rows that tokens send to experts."""
    if factor == 1.0 or not layer.routed:
        return layer
    times = 1.0 + (factor - 1.0) * layer.routed_share
    return replace(
        layer,
        forward=_longer(layer.forward, layer.routed, times),
        backward_input=_longer(layer.backward_input, map(transposed_weight, layer.routed), times),
        backward_weight=_longer(layer.backward_weight, map(transposed_input, layer.routed), times),
        dispatched=factor * layer.dispatched,
        kept=layer.kept + (factor - 1.0) * layer.routed_kept,
        unchanged=layer.unchanged or layer,
    )


def _longer(work: PassWork, products: Iterable[Matmul], times: float) -> PassWork:
    """Return the work of a pass with `times` the work of some of its products."""
    chosen = tuple(products)
    matmuls = (replace(one, count=times * one.count) if one in chosen else one for one in work.matmuls)
    return replace(work, matmuls=tuple(matmuls))
