"""Forward and backward passes of a stage on one micro-batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from weft.program.program import NONE, Instruction
from weft.run.channels import ACTIVATION, OUTPUT_GRADIENT
from weft.run.handlers.base import (
    GATHERED,
    INPUT_GRADIENT,
    MICRO_BATCH,
    OUTPUT,
    SAVED,
    WEIGHT_PART,
    Compute,
)
from weft.run.loss_input import loss_input
from weft.run.recompute import LayerFunction, layer_functions, run_layers
from weft.run.tensor_stage import leads_replica
from weft.run.work_queue import nothing_to_wait_for
from weft.run.workspace import Workspace


def forward(workspace: Workspace, instruction: Instruction) -> Compute:
    """Run a stage on one micro-batch; the last stage also computes the weighted loss."""
    stage, number = instruction.stage, instruction.micro_batch
    route, values, resources = workspace.route, workspace.values, workspace.resources
    module = resources.stages[stage]
    first, last = stage not in route.before, stage not in route.after
    draws = workspace.training and draws_numbers(module)
    recompute = resources.recompute[stage] if workspace.training else "none"
    await_weights = _gathered(workspace, stage)
    statistics = resources.statistics[stage]
    loss_function = resources.loss_function
    # The ranks of a replica all have the same loss.
    counts = leads_replica(module)

    def ready() -> None:
        await_weights()
        if not first:
            values[ACTIVATION, stage, number] = workspace.arrived(ACTIVATION, stage, number)
        if first or last:
            loaded = workspace.micro_batch(number)
            if first:
                inputs = loaded.inputs.to(resources.device)
                # Samples come in one precision, whatever the model computes in.
                wanted = resources.dtype if inputs.is_floating_point() else inputs.dtype
                values[ACTIVATION, stage, number] = inputs.to(wanted)
            if last:
                values[MICRO_BATCH, stage, number] = loaded.targets.to(resources.device)

    def weighted_loss(function: LayerFunction, targets: torch.Tensor) -> LayerFunction:
        def compute(value: torch.Tensor) -> torch.Tensor:
            output = loss_input(module, loss_function, function(value))
            return loss_function(output, targets) * workspace.micro_batch_weight

        return compute

    def seeded(place: int, function: LayerFunction) -> LayerFunction:
        def draw_and_run(value: torch.Tensor) -> torch.Tensor:
            workspace.reseed(resources.first_layers[stage] + place, number)
            return function(value)

        return draw_and_run

    def execute() -> None:
        inputs = values.pop((ACTIVATION, stage, number))
        if workspace.training and not first:
            inputs = inputs.detach().requires_grad_()
        with torch.set_grad_enabled(workspace.training):
            layered = draws or recompute != "none"
            functions = layer_functions(module, inputs) if layered else (module,)
            if draws:
                functions = [seeded(place, function) for place, function in enumerate(functions)]
            if last:
                targets = values.pop((MICRO_BATCH, stage, number))
                functions = (*functions[:-1], weighted_loss(functions[-1], targets))
            output = run_layers(functions, inputs, recompute=recompute, draws=draws)
        if workspace.training:
            statistics.count()
            values[SAVED, stage, number] = (inputs, output)
        if last:
            workspace.loss += output.item() if counts else 0.0
        elif (stage, number) in route.activations_sent:
            values[OUTPUT, stage, number] = output.detach()
        else:
            values[ACTIVATION, route.after[stage], number] = output.detach()

    return Compute(ready, execute)


def backward(workspace: Workspace, instruction: Instruction) -> Compute:
    """Accumulate a stage's weight gradients for one micro-batch and hand on the gradient of its input."""
    complete = _completion(workspace, instruction)

    def execute(inputs: torch.Tensor, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
        torch.autograd.backward(output, gradient)
        complete()

    return _going_back(workspace, instruction, execute)


def backward_input(workspace: Workspace, instruction: Instruction) -> Compute:
    """Hand on the gradient of a stage's input for one micro-batch and keep what the weight part needs."""
    # The part of torch that splits autograd takes seconds to import, which orders of whole passes do without.
    from weft.run.split_backward import run_input_part

    stage, number = instruction.stage, instruction.micro_batch
    module = workspace.resources.stages[stage]

    def execute(inputs: torch.Tensor, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
        workspace.values[WEIGHT_PART, stage, number] = run_input_part(module, inputs, output, gradient)

    return _going_back(workspace, instruction, execute)


def backward_weight(workspace: Workspace, instruction: Instruction) -> Compute:
    """Accumulate a stage's weight gradients for one micro-batch whose input part has run."""
    key = (WEIGHT_PART, instruction.stage, instruction.micro_batch)
    complete = _completion(workspace, instruction)

    def execute() -> None:
        workspace.values.pop(key).run()
        complete()

    return Compute(workspace.resources.buckets[instruction.stage].claim, execute)


def draws_numbers(module: nn.Module) -> bool:
    """Whether the module drops out anything while it trains."""
    return any(getattr(part, "p", 0) for part in module.modules() if "Dropout" in type(part).__name__)


def _completion(workspace: Workspace, instruction: Instruction) -> Callable[[], None]:
    """What ends a computation of gradients: after a stage's last, its replica's ranks add up their parts."""
    summed = workspace.resources.summed.get(instruction.stage, ())
    if instruction.position not in workspace.last_gradients:
        summed = ()

    def complete() -> None:
        for one in summed:
            one.add_up()

    return complete


def _going_back(
    workspace: Workspace,
    instruction: Instruction,
    differentiate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], None],
) -> Compute:
    """Wait for the gradient of the output, let `differentiate` set that of the input, and hand it on."""
    stage, number = instruction.stage, instruction.micro_batch
    route, values = workspace.route, workspace.values
    first, last = stage not in route.before, stage not in route.after

    # The input part of a first stage makes a gradient, too: see `run_input_part`.
    makes_gradients = instruction.kind.name != "backward_input" or first
    claim = workspace.resources.buckets[stage].claim
    await_weights = _gathered(workspace, stage)

    def ready() -> None:
        await_weights()
        if makes_gradients:
            claim()
        if not last:
            values[OUTPUT_GRADIENT, stage, number] = workspace.arrived(OUTPUT_GRADIENT, stage, number)

    def execute() -> None:
        inputs, output = values.pop((SAVED, stage, number))
        gradient = None if last else values.pop((OUTPUT_GRADIENT, stage, number))
        differentiate(inputs, output, gradient)
        if first:
            return
        if (stage, number) in route.gradients_sent:
            values[INPUT_GRADIENT, stage, number] = inputs.grad
        else:
            values[OUTPUT_GRADIENT, route.before[stage], number] = inputs.grad

    return Compute(ready, execute)


def _gathered(workspace: Workspace, stage: int) -> Callable[[], None]:
    """What waits until the weights of a stage are there."""
    values, shard = workspace.values, workspace.resources.shards.get(stage)
    if shard is None:
        return nothing_to_wait_for

    def wait() -> None:
        if (gathered := values.pop((GATHERED, stage, NONE), None)) is not None:
            gathered.wait()
        shard.weights.require()

    return wait
