"""Messages between stages on different ranks."""

from __future__ import annotations

from math import prod

import torch

from weft.program.program import NONE, Instruction
from weft.run.handlers.base import INPUT_GRADIENT, OUTPUT, Issue
from weft.run.stage.borders import Crossing
from weft.run.streams import Completion, Stream, Value
from weft.run.transport.channels import ACTIVATION, OUTPUT_GRADIENT
from weft.run.workspace import Workspace


def send_activation(workspace: Workspace, instruction: Instruction) -> Issue:
    edge = (instruction.stage, instruction.part)
    shape = crossing_of(workspace, instruction, after=True).sent_shape
    return send(workspace, instruction, OUTPUT, ACTIVATION, edge, shape)


def send_gradient(workspace: Workspace, instruction: Instruction) -> Issue:
    edge = (instruction.part, instruction.stage)
    shape = crossing_of(workspace, instruction, after=False).sent_shape
    return send(workspace, instruction, INPUT_GRADIENT, OUTPUT_GRADIENT, edge, shape)


def receive_activation(workspace: Workspace, instruction: Instruction) -> Issue:
    edge = (instruction.part, instruction.stage)
    shape = crossing_of(workspace, instruction, after=False).shape
    return receive(workspace, instruction, ACTIVATION, ACTIVATION, edge, shape)


def receive_gradient(workspace: Workspace, instruction: Instruction) -> Issue:
    edge = (instruction.stage, instruction.part)
    shape = crossing_of(workspace, instruction, after=True).shape
    return receive(workspace, instruction, OUTPUT_GRADIENT, OUTPUT_GRADIENT, edge, shape)


def send(
    workspace: Workspace,
    instruction: Instruction,
    name: str,
    payload: str,
    edge: tuple[int, int],
    shape: tuple[int, ...],
) -> Issue:
    """Send the value that crosses an edge of stages, and was left under this name."""
    key, label = (name, *edge, instruction.micro_batch, instruction.peer), str(instruction)
    resources, crossed = workspace.resources, workspace.crossed
    outbox = resources.messages.outgoing(instruction.peer, payload, prod(shape) * resources.dtype.itemsize)

    def issue(stream: Stream) -> Completion:
        return outbox.send(stream, label, crossed.pop(key))

    return issue


def receive(
    workspace: Workspace,
    instruction: Instruction,
    name: str,
    payload: str,
    edge: tuple[int, int],
    shape: tuple[int, ...],
) -> Issue:
    """Receive the value that crosses an edge of stages, and leave it under this name."""
    key, label = (name, *edge, instruction.micro_batch, NONE), str(instruction)
    resources, crossed = workspace.resources, workspace.crossed
    dtype, device = resources.dtype, resources.device
    inbox = resources.messages.incoming(instruction.peer, payload, prod(shape) * dtype.itemsize)

    def issue(stream: Stream) -> Completion:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        arrived = inbox.receive(stream, label, tensor)
        crossed[key] = Value.of(tensor, arrived)
        return arrived

    return issue


def crossing_of(workspace: Workspace, instruction: Instruction, *, after: bool) -> Crossing:
    """Return the crossing between the instruction's stage and the stage before or after it."""
    borders = workspace.resources.borders[instruction.stage]
    return (borders.after if after else borders.before)[instruction.part]
