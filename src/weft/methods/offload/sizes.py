"""The bytes that offload moves: a stage's optimizer states, and the activations of one micro-batch."""

from __future__ import annotations

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.predict.cost.memory import STEPPED_BYTES, stage_kept_bytes, stage_parameters


def state_bytes(plan: Plan, graph: LayerGraph, stage: int) -> int:
    """Return the bytes of optimizer states of a stage on one rank; fp32 masters of weights stay."""
    parameters = stage_parameters(graph, plan.stages[stage].layers, plan.shape(stage))
    kept = plan.optimizer.kept_bytes(STEPPED_BYTES[plan.precision])
    return kept * -(-parameters // plan.sharers(stage))


def input_bytes(plan: Plan, graph: LayerGraph, stage: int) -> int:
    """Return the bytes of a stage's inputs from other stages, which stay on the device."""
    layers, amounts = set(plan.stages[stage].layers), graph.amounts("sent", plan.shape(stage))
    feeders = {one for layer in layers for one in graph.feeders[layer]} - layers
    return round(plan.element_bytes * sum(amounts[one] for one in feeders))


def activation_bytes(plan: Plan, graph: LayerGraph, stage: int) -> int:
    """Return the moved bytes of activations that one micro-batch leaves in a stage."""
    kept = stage_kept_bytes(graph, plan.stages[stage].layers, plan.shape(stage), plan.precision)
    return max(0, kept - input_bytes(plan, graph, stage))
