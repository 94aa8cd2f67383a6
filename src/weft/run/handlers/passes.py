"""Forward and backward passes of a stage on one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from weft.program.program import NONE, Instruction
from weft.run.channels import ACTIVATION, OUTPUT_GRADIENT
from weft.run.handlers.base import (
    GRADIENT,
    INPUT_GRADIENT,
    OUTPUT,
    SAVED,
    WEIGHT_PART,
    WEIGHTS,
    Issue,
)
from weft.run.layers import LayerFunction, layer_functions, run_layers
from weft.run.loss_input import loss_input
from weft.run.streams import THERE, Completion, Stream, Value
from weft.run.tensor_stage import leads_replica
from weft.run.workspace import Workspace

# From a stage's input, the targets where it is the last one, and the step.
StagePass = Callable[[torch.Tensor, torch.Tensor | None, int], torch.Tensor]

# Of a stage's input, its output and the gradient of it (None for a loss), and the step.
Differentiate = Callable[..., Any]


def forward(workspace: Workspace, instruction: Instruction) -> Issue:
    """Run a stage on one micro-batch; the last stage also computes the weighted loss."""
    stage, number, label = instruction.stage, instruction.micro_batch, str(instruction)
    route, values, resources = workspace.route, workspace.values, workspace.resources
    first, last, training = stage not in route.before, stage not in route.after, workspace.training
    sent = (stage, number) in route.activations_sent
    made_as = (OUTPUT, stage, number) if sent else (ACTIVATION, route.after.get(stage, NONE), number)
    weights = (WEIGHTS, stage, NONE)
    # The ranks of a replica all have the same loss.
    counts = last and leads_replica(resources.stages[stage])
    run_stage, require_weights = _stage_pass(workspace, instruction), weights_required(workspace, stage)
    statistics, device, dtype = resources.statistics[stage], resources.device, resources.dtype

    def issue(stream: Stream) -> Completion:
        loaded = workspace.micro_batch(number) if first or last else None
        given = Value.of(loaded.inputs) if first else values.pop((ACTIVATION, stage, number))
        saved, made, step = Value(), Value(), workspace.step

        def work() -> None:
            require_weights()
            inputs = given.content
            if first:
                # Samples come in one precision, whatever the model computes in.
                inputs = inputs.to(device, dtype if inputs.is_floating_point() else inputs.dtype)
            elif training:
                inputs = inputs.detach().requires_grad_()
            output = run_stage(inputs, loaded.targets.to(device) if last else None, step)
            if training:
                statistics.count()
                saved.content = (inputs, output)
            made.content = output.detach()

        ended = stream.run(label, work, given, values.get(weights, THERE))
        saved.completion = made.completion = ended
        if training:
            values[SAVED, stage, number] = saved
        if counts:
            workspace.losses.append(made)
        elif not last:
            values[made_as] = made
        return ended

    return issue


def backward(workspace: Workspace, instruction: Instruction) -> Issue:
    """Accumulate a stage's weight gradients for one micro-batch and hand on the gradient of its input."""
    add_up = added_up(workspace, instruction)
    claim = workspace.resources.buckets[instruction.stage].claim

    def differentiate(
        inputs: torch.Tensor, output: torch.Tensor, gradient: torch.Tensor | None, *, step: int
    ) -> None:
        claim()
        torch.autograd.backward(output, gradient)
        add_up()

    return _going_back(workspace, instruction, differentiate)


def backward_input(workspace: Workspace, instruction: Instruction) -> Issue:
    """Hand on the gradient of a stage's input for one micro-batch and keep what the weight part needs."""
    # The part of torch that splits autograd takes seconds to import, which orders of whole passes do without.
    from weft.run.split_backward import WeightPart, run_input_part

    module = workspace.resources.stages[instruction.stage]
    # The input part of a first stage makes a gradient, too: see `run_input_part`.
    makes_gradients = instruction.stage not in workspace.route.before
    claim = workspace.resources.buckets[instruction.stage].claim

    def differentiate(
        inputs: torch.Tensor, output: torch.Tensor, gradient: torch.Tensor | None, *, step: int
    ) -> WeightPart:
        if makes_gradients:
            claim()
        return run_input_part(module, inputs, output, gradient)

    return _going_back(workspace, instruction, differentiate, leaves=WEIGHT_PART)


def backward_weight(workspace: Workspace, instruction: Instruction) -> Issue:
    """Accumulate a stage's weight gradients for one micro-batch whose input part has run."""
    stage, number, label = instruction.stage, instruction.micro_batch, str(instruction)
    bucket, add_up = workspace.resources.buckets[stage], added_up(workspace, instruction)
    completes = instruction.position in workspace.last_gradients

    def differentiate(part: Any, *, step: int) -> None:
        bucket.claim()
        part.run()
        add_up()

    shown = seen(workspace, instruction, differentiate, ends=True)

    def issue(stream: Stream) -> Completion:
        part, step = workspace.values.pop((WEIGHT_PART, stage, number)), workspace.step

        def work() -> None:
            shown(part.content, step=step)

        ended = stream.run(label, work, part, bucket.buffer.emptied)
        if completes:
            workspace.values[GRADIENT, stage, NONE] = Value.of(None, ended)
        return ended

    return issue


def draws_numbers(module: nn.Module) -> bool:
    """Whether the module drops out anything while it trains."""
    return any(getattr(part, "p", 0) for part in module.modules() if "Dropout" in type(part).__name__)


def _stage_pass(workspace: Workspace, instruction: Instruction) -> StagePass:
    """What runs a stage forward, and computes the weighted loss where it is given targets."""
    stage, number, resources = instruction.stage, instruction.micro_batch, workspace.resources
    module, loss_function = resources.stages[stage], resources.loss_function
    draws = workspace.training and draws_numbers(module)
    recompute = resources.recompute[stage] if workspace.training else "none"
    taps = resources.taps.get(stage) if workspace.training else None
    sees_layers = taps is not None and taps.sees_layers
    layered = draws or recompute != "none" or sees_layers

    def weighted_loss(function: LayerFunction, targets: torch.Tensor) -> LayerFunction:
        def compute(value: torch.Tensor) -> torch.Tensor:
            output = loss_input(module, loss_function, function(value))
            return loss_function(output, targets) * workspace.micro_batch_weight

        return compute

    def seeded(place: int, function: LayerFunction, step: int) -> LayerFunction:
        def draw_and_run(value: torch.Tensor) -> torch.Tensor:
            workspace.reseed(step, resources.first_layers[stage] + place, number)
            return function(value)

        return draw_and_run

    def layers_of(inputs: torch.Tensor, step: int) -> Sequence[LayerFunction]:
        functions = layer_functions(module, inputs) if layered else (module,)
        if draws:
            functions = [seeded(place, function, step) for place, function in enumerate(functions)]
        return functions

    def to_the_loss(
        functions: Sequence[LayerFunction], targets: torch.Tensor | None
    ) -> Sequence[LayerFunction]:
        return functions if targets is None else (*functions[:-1], weighted_loss(functions[-1], targets))

    def run(inputs: torch.Tensor, targets: torch.Tensor | None, step: int) -> torch.Tensor:
        with torch.set_grad_enabled(workspace.training):
            functions = to_the_loss(layers_of(inputs, step), targets)
            return run_layers(functions, inputs, recompute=recompute, draws=draws)

    def run_seen(inputs: torch.Tensor, targets: torch.Tensor | None, step: int) -> torch.Tensor:
        with torch.enable_grad():
            now = taps.passing(step, number)
            functions = to_the_loss(taps.watched(layers_of(inputs, step), now), targets)
            return taps.run_layers(functions, inputs, now, recompute=recompute, draws=draws)

    return run_seen if sees_layers else run


def _going_back(
    workspace: Workspace,
    instruction: Instruction,
    differentiate: Differentiate,
    *,
    leaves: str | None = None,
) -> Issue:
    """Let `differentiate` set the gradient of the input and hand it on.

    What it returns is left for the stage and micro-batch under the name `leaves`.
    """
    stage, number, label = instruction.stage, instruction.micro_batch, str(instruction)
    route, values, buffer = workspace.route, workspace.values, workspace.resources.buckets[stage].buffer
    first, last = stage not in route.before, stage not in route.after
    sent = (stage, number) in route.gradients_sent
    made_as = (INPUT_GRADIENT, stage, number) if sent else (OUTPUT_GRADIENT, route.before.get(stage), number)
    completes = instruction.position in workspace.last_gradients
    require_weights, weights = weights_required(workspace, stage), (WEIGHTS, stage, NONE)
    shown = seen(workspace, instruction, differentiate, ends=leaves is None)

    def issue(stream: Stream) -> Completion:
        saved = values.pop((SAVED, stage, number))
        given = THERE if last else values.pop((OUTPUT_GRADIENT, stage, number))
        made, step = Value(), workspace.step
        left = Value() if leaves is not None else made

        def work() -> None:
            require_weights()
            inputs, output = saved.content
            gradient = given.content
            if last and workspace.gradient_weight != 1.0:
                gradient = torch.full_like(output, workspace.gradient_weight)
            left.content = shown(inputs, output, gradient, step=step)
            made.content = inputs.grad

        ended = stream.run(label, work, saved, given, values.get(weights, THERE), buffer.emptied)
        made.completion = left.completion = ended
        if not first:
            values[made_as] = made
        if leaves is not None:
            values[leaves, stage, number] = left
        if completes:
            values[GRADIENT, stage, NONE] = Value.of(None, ended)
        return ended

    return issue


def seen(
    workspace: Workspace, instruction: Instruction, differentiate: Differentiate, *, ends: bool
) -> Differentiate:
    """The same, before the eyes of the stage's taps where it has any; `ends`: it makes the last gradients."""
    taps = workspace.resources.taps.get(instruction.stage)
    return differentiate if taps is None else taps.around(instruction.micro_batch, differentiate, ends=ends)


def added_up(workspace: Workspace, instruction: Instruction) -> Callable[[], None]:
    """What ends a computation of gradients: after a stage's last, its replica's ranks add up their parts."""
    summed = workspace.resources.summed.get(instruction.stage, ())
    if instruction.position not in workspace.last_gradients:
        summed = ()

    def add_up() -> None:
        for one in summed:
            one.add_up()

    return add_up


def weights_required(workspace: Workspace, stage: int) -> Callable[[], None]:
    """What checks that the weights of a stage are where its parameters look for them."""
    shard = workspace.resources.shards.get(stage)
    return _nothing if shard is None else shard.weights.require


def _nothing() -> None:
    """Weights that never leave are there."""
