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
SAVED, MICRO_BATCH, REDUCED = "saved", "micro_batch", "reduced_gradient"
WEIGHT_PART = "saved_for_weight"

# Payload kinds of messages and the tags that keep them apart.
TAGS = {ACTIVATION: 1, OUTPUT_GRADIENT: 2}


def forward(workspace: Workspace, instruction: Instruction) -> Compute:
    """Run a stage on one micro-batch; the last stage also computes the weighted loss."""
    stage, number = instruction.stage, instruction.micro_batch
    route, values, resources = workspace.route, workspace.values, workspace.resources
    module = resources.stages[stage]
    first, last = stage not in route.before, stage not in route.after
    draws = workspace.training and draws_numbers(module)

    def ready() -> None:
        if not first:
            values[ACTIVATION, stage, number] = workspace.arrived(ACTIVATION, stage, number)
        if first or last:
            loaded = workspace.micro_batch(number)
            if first:
                values[ACTIVATION, stage, number] = loaded.inputs.to(resources.device)
            if last:
                values[MICRO_BATCH, stage, number] = loaded.targets.to(resources.device)

    def execute() -> None:
        inputs = values.pop((ACTIVATION, stage, number))
        if draws:
            workspace.reseed(stage, number)
        if workspace.training and not first:
            inputs = inputs.detach().requires_grad_()
        with torch.set_grad_enabled(workspace.training):
            output = module(inputs)
            if last:
                targets = values.pop((MICRO_BATCH, stage, number))
                output = resources.loss_function(output, targets) * workspace.micro_batch_weight
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

    return Compute(_nothing_to_wait_for, execute)


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


def reduce(workspace: Workspace, instruction: Instruction) -> Transfer:
    """Make the replicas of a stage agree on its gradient, on the thread of the collective stream."""
    resources = workspace.resources
    gradient = resources.buckets[instruction.stage].flat
    group = resources.groups.collective[instruction.group]
    label = str(instruction)

    def run() -> torch.Tensor:
        # gloo works on host memory: elsewhere the gradient takes the way through it.
        on_host = gradient.to("cpu")
        resources.synchroniser.reduce(on_host, group)
        return gradient.copy_(on_host) if on_host is not gradient else gradient

    def post(stamp: Stamp) -> Handle:
        handle = resources.collectives.put(Job(Handle(label), run, stamp))
        workspace.values[REDUCED, instruction.stage, NONE] = handle
        return handle

    return Transfer(post)


def step(workspace: Workspace, instruction: Instruction) -> Compute:
    """Step a stage's optimizer once its gradient is reduced, then clear the gradient."""
    stage = instruction.stage
    optimizer, bucket = workspace.resources.optimizers[stage], workspace.resources.buckets[stage]

    def ready() -> None:
        reduced = workspace.values.pop((REDUCED, stage, NONE), None)
        if reduced is not None:
            reduced.wait()

    def execute() -> None:
        optimizer.step()
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
    "reduce": reduce,
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

    def ready() -> None:
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


def _nothing_to_wait_for() -> None:
    """What the instruction reads was made by this rank's own thread."""


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
