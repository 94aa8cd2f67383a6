"""How each kind of instruction is executed: a registry, open to new kinds.

A handler is called once per instruction when the executor is made and returns what to do in every step:
`Compute` runs on the main thread, `Transfer` is posted and goes on by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from weft.program.program import NONE, Instruction
from weft.run.channels import Handle, Job, Stamp
from weft.run.recompute import LayerFunction, layer_functions, run_layers
from weft.run.split_backward import run_input_part
from weft.run.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Compute:
    """`ready` waits for what the instruction reads; `execute` computes."""

    ready: Callable[[], None]
    execute: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Transfer:
    """`post` starts the transfer and returns; its handle is done when the transfer is."""

    post: Callable[[Stamp], Handle]


Handler = Callable[[Workspace, Instruction], Compute | Transfer]

ACTIVATION, OUTPUT, OUTPUT_GRADIENT, INPUT_GRADIENT = (
    "activation",
    "output",
    "output_gradient",
    "input_gradient",
)
SAVED, MICRO_BATCH, REDUCED, GATHERED = "saved", "micro_batch", "reduced_gradient", "gathered_weights"
WEIGHT_PART, REDUCED_TIED = "saved_for_weight", "reduced_tied_gradient"

# Payload kinds of messages and the tags that keep them apart.
TAGS = {ACTIVATION: 1, OUTPUT_GRADIENT: 2}


def forward(workspace: Workspace, instruction: Instruction) -> Compute:
    """Run a stage on one micro-batch; the last stage also computes the weighted loss."""
    stage, number = instruction.stage, instruction.micro_batch
    route, values, resources = workspace.route, workspace.values, workspace.resources
    module = resources.stages[stage]
    first, last = stage not in route.before, stage not in route.after
    draws = workspace.training and draws_numbers(module)
    recomputes = workspace.training and stage in resources.recomputing
    shared = stage in resources.shards

    def ready() -> None:
        if shared and (gathered := values.pop((GATHERED, stage, NONE), None)) is not None:
            gathered.wait()
        if not first:
            values[ACTIVATION, stage, number] = workspace.arrived(ACTIVATION, stage, number)
        if first or last:
            loaded = workspace.micro_batch(number)
            if first:
                values[ACTIVATION, stage, number] = loaded.inputs.to(resources.device)
            if last:
                values[MICRO_BATCH, stage, number] = loaded.targets.to(resources.device)

    def weighted_loss(function: LayerFunction, targets: torch.Tensor) -> LayerFunction:
        return lambda value: resources.loss_function(function(value), targets) * workspace.micro_batch_weight

    def execute() -> None:
        inputs = values.pop((ACTIVATION, stage, number))
        if draws:
            workspace.reseed(stage, number)
        if workspace.training and not first:
            inputs = inputs.detach().requires_grad_()
        with torch.set_grad_enabled(workspace.training):
            functions = layer_functions(module, inputs) if recomputes else (module,)
            if last:
                targets = values.pop((MICRO_BATCH, stage, number))
                functions = (*functions[:-1], weighted_loss(functions[-1], targets))
            output = run_layers(functions, inputs, recompute=recomputes, draws=draws)
        if workspace.training:
            values[SAVED, stage, number] = (inputs, output)
        if last:
            workspace.loss += output.item()
        elif (stage, number) in route.activations_sent:
            values[OUTPUT, stage, number] = output.detach()
        else:
            values[ACTIVATION, route.after[stage], number] = output.detach()

    return Compute(ready, execute)


def backward(workspace: Workspace, instruction: Instruction) -> Compute:
    """Accumulate a stage's weight gradients for one micro-batch and hand on the gradient of its input."""

    def execute(inputs: torch.Tensor, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
        torch.autograd.backward(output, gradient)

    return _going_back(workspace, instruction, execute)


def backward_input(workspace: Workspace, instruction: Instruction) -> Compute:
    """Hand on the gradient of a stage's input for one micro-batch and keep what the weight part needs."""
    stage, number = instruction.stage, instruction.micro_batch
    module = workspace.resources.stages[stage]

    def execute(inputs: torch.Tensor, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
        workspace.values[WEIGHT_PART, stage, number] = run_input_part(module, inputs, output, gradient)

    return _going_back(workspace, instruction, execute)


def backward_weight(workspace: Workspace, instruction: Instruction) -> Compute:
    """Accumulate a stage's weight gradients for one micro-batch whose input part has run."""
    key = (WEIGHT_PART, instruction.stage, instruction.micro_batch)

    def execute() -> None:
        workspace.values.pop(key).run()

    return Compute(workspace.resources.buckets[instruction.stage].claim, execute)


def send_activation(workspace: Workspace, instruction: Instruction) -> Transfer:
    return _send(workspace, instruction, OUTPUT, ACTIVATION)


def send_gradient(workspace: Workspace, instruction: Instruction) -> Transfer:
    return _send(workspace, instruction, INPUT_GRADIENT, OUTPUT_GRADIENT)


def receive_activation(workspace: Workspace, instruction: Instruction) -> Transfer:
    resources = workspace.resources
    module = resources.stages[instruction.stage]
    shape = module.input_shape(resources.micro_batch_size, resources.sequence)
    return _receive(workspace, instruction, ACTIVATION, shape)


def receive_gradient(workspace: Workspace, instruction: Instruction) -> Transfer:
    resources = workspace.resources
    module = resources.stages[instruction.stage]
    shape = module.output_shape(resources.micro_batch_size, resources.sequence)
    return _receive(workspace, instruction, OUTPUT_GRADIENT, shape)


def gather(workspace: Workspace, instruction: Instruction) -> Transfer:
    """Bring a stage's weights up to date from all shares, on the thread of the collective stream."""
    stage, label, resources = instruction.stage, str(instruction), workspace.resources
    shard = resources.shards[stage]

    def post(stamp: Stamp) -> Handle:
        handle = resources.collectives.put(Job(Handle(label), shard.gather, stamp))
        workspace.values[GATHERED, stage, NONE] = handle
        return handle

    return Transfer(post)


def reduce(workspace: Workspace, instruction: Instruction) -> Transfer:
    """Make the replicas of a stage agree on its gradient, on the thread of the collective stream.

    Where they share out what they step, each gets its share of the sum, and the gradient's buffer is free
    for another stage.
    """
    stage, part, label, resources = instruction.stage, instruction.part, str(instruction), workspace.resources
    bucket, shard = resources.buckets[stage], resources.shards.get(stage)
    group = resources.groups.collective[instruction.group]

    def run() -> torch.Tensor:
        # gloo works on host memory: elsewhere the gradient takes the way through it.
        gradient, on_host = bucket.flat, bucket.flat.to("cpu")
        if shard is not None:
            return shard.take_in(resources.synchroniser.reduce_scatter(on_host, group), part)
        resources.synchroniser.reduce(on_host, group)
        return gradient.copy_(on_host) if on_host is not gradient else gradient

    def post(stamp: Stamp) -> Handle:
        handle = resources.collectives.put(Job(Handle(label), run, stamp))
        workspace.values[REDUCED, stage, NONE] = handle
        if shard is not None:
            bucket.hand_back(handle.wait)
        return handle

    return Transfer(post)


def reduce_tied(workspace: Workspace, instruction: Instruction) -> Transfer:
    """Add up the gradients of all copies of a weight, on the thread of the collective stream."""
    part, label, resources = instruction.part, str(instruction), workspace.resources
    tied, group = resources.tied[part], resources.groups.collective[instruction.group]

    def run() -> torch.Tensor:
        return tied.reduce(resources.synchroniser, group)

    def post(stamp: Stamp) -> Handle:
        handle = resources.collectives.put(Job(Handle(label), run, stamp))
        for stage in tied.stages:
            workspace.values[REDUCED_TIED, stage, part] = handle
        return handle

    return Transfer(post)


def step(workspace: Workspace, instruction: Instruction) -> Compute:
    """Step a stage's optimizer once its gradient is reduced, then clear the gradient.

    A gradient that was handed back is cleared by the next stage to claim its buffer.
    """
    stage = instruction.stage
    shared = stage in workspace.resources.shards
    optimizer, bucket = workspace.resources.optimizers[stage], workspace.resources.buckets[stage]
    tied = {part: one for part, one in workspace.resources.tied.items() if stage in one.stages}

    def ready() -> None:
        for part in tied:
            workspace.values.pop((REDUCED_TIED, stage, part)).wait()
        reduced = workspace.values.pop((REDUCED, stage, NONE), None)
        if reduced is not None:
            reduced.wait()

    def execute() -> None:
        optimizer.step()
        for one in tied.values():
            one.clear(stage)
        if not shared:
            bucket.clear()

    return Compute(ready, execute)


HANDLERS: dict[str, Handler] = {
    "forward": forward,
    "backward": backward,
    "backward_input": backward_input,
    "backward_weight": backward_weight,
    "send_activation": send_activation,
    "send_gradient": send_gradient,
    "receive_activation": receive_activation,
    "receive_gradient": receive_gradient,
    "gather": gather,
    "reduce": reduce,
    "reduce_tied": reduce_tied,
    "step": step,
}


def draws_numbers(module: nn.Module) -> bool:
    """Whether the module drops out anything while it trains."""
    return any(getattr(part, "p", 0) for part in module.modules() if "Dropout" in type(part).__name__)


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

    def ready() -> None:
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


def _send(workspace: Workspace, instruction: Instruction, value: str, payload: str) -> Transfer:
    key = (value, instruction.stage, instruction.micro_batch)
    label = str(instruction)
    channels = workspace.resources.channels

    def post(stamp: Stamp) -> Handle:
        tensor = workspace.values.pop(key).to("cpu").contiguous()
        return channels.send(tensor, instruction.peer, payload, label, stamp)

    return Transfer(post)


def _receive(
    workspace: Workspace, instruction: Instruction, payload: str, shape: tuple[int, ...]
) -> Transfer:
    key = (payload, instruction.stage, instruction.micro_batch)
    label = str(instruction)
    dtype, channels = workspace.resources.dtype, workspace.resources.channels

    def post(stamp: Stamp) -> Handle:
        handle = channels.receive(shape, dtype, instruction.peer, payload, label, stamp)
        workspace.values[key] = handle
        return handle

    return Transfer(post)
