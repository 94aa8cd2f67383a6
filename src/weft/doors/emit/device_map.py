"""A device map: the device of each module, as accelerate and `transformers` read it.

The file is a JSON object from the names of modules to numbers of devices. It needs a captured model, whose
layers have the names of its modules, and one rank for each stage.
"""

from __future__ import annotations

import json

from weft.describe.families.captured import FAMILY
from weft.doors.emit.base import Emitted, Loss
from weft.errors import InputError, Violation
from weft.planning.planned_job import PlannedJob

NAME = "device-map"
STACK = "accelerate"
# The model then lies as planned: from_pretrained moves each module, and hooks move tensors between them.
_LAUNCH = 'model = AutoModel.from_pretrained("...", device_map=json.load(open("device_map.json")))'


def emit(planned: PlannedJob) -> Emitted:
    """Return the device map of the plan.

    Raises:
        InputError: when the model is not a captured one, or a stage has several replicas or ranks.
    """
    model, plan = planned.problem.model, planned.plan
    problems = []
    if model.family != FAMILY:
        problem = f"{model.name} has no modules by name; `weft capture` writes models that have them"
        problems.append(Violation("--emit device-map", problem))
    if not plan.has_layers_once:
        problem = "a stage of the plan has several replicas or ranks, and one process has each module once"
        problems.append(Violation("--emit device-map", problem, "--dp 1 --tp 1"))
    if problems:
        raise InputError(problems)
    layers, ranks = planned.problem.job.graph.layers, plan.rank_of_layers
    places = {layer.name: ranks[position] for position, layer in enumerate(layers)}
    losses = []
    if plan.micro_batches > 1:
        flow = f"{plan.micro_batches} micro-batches that flow over the devices"
        losses.append(Loss(flow, "the whole batch at once, while all devices but one wait"))
    if any(stage.recompute != "none" for stage in plan.stages):
        losses.append(Loss("recomputation", "gradient_checkpointing of the model"))
    return Emitted(
        file="device_map.json",
        text=json.dumps(places, indent=1) + "\n",
        launch=_LAUNCH,
        losses=tuple(losses),
    )
