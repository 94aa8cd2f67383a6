"""Messages between stages on different ranks."""

from __future__ import annotations

import math

import torch

from weft.program.program import Instruction
from weft.run.channels import ACTIVATION, OUTPUT_GRADIENT
from weft.run.handlers.base import INPUT_GRADIENT, OUTPUT, Issue
from weft.run.streams import Completion, Stream, Value
from weft.run.workspace import Workspace


def send_activation(workspace: Workspace, instruction: Instruction) -> Issue:
    return _send(workspace, instruction, OUTPUT, ACTIVATION, _output_shape(workspace, instruction.stage))


def send_gradient(workspace: Workspace, instruction: Instruction) -> Issue:
    shape = _input_shape(workspace, instruction.stage)
    return _send(workspace, instruction, INPUT_GRADIENT, OUTPUT_GRADIENT, shape)


def receive_activation(workspace: Workspace, instruction: Instruction) -> Issue:
    return _receive(workspace, instruction, ACTIVATION, _input_shape(workspace, instruction.stage))


def receive_gradient(workspace: Workspace, instruction: Instruction) -> Issue:
    return _receive(workspace, instruction, OUTPUT_GRADIENT, _output_shape(workspace, instruction.stage))


def _send(
    workspace: Workspace, instruction: Instruction, name: str, payload: str, shape: tuple[int, ...]
) -> Issue:
    key, label = (name, instruction.stage, instruction.micro_batch), str(instruction)
    resources, values = workspace.resources, workspace.values
    size_bytes = math.prod(shape) * resources.dtype.itemsize
    outbox = resources.channels.outgoing(instruction.peer, payload, size_bytes)

    def issue(stream: Stream) -> Completion:
        return outbox.send(stream, label, values.pop(key))

    return issue


def _receive(workspace: Workspace, instruction: Instruction, payload: str, shape: tuple[int, ...]) -> Issue:
    key, label = (payload, instruction.stage, instruction.micro_batch), str(instruction)
    resources, values = workspace.resources, workspace.values
    dtype, device = resources.dtype, resources.device
    size_bytes = math.prod(shape) * dtype.itemsize
    inbox = resources.channels.incoming(instruction.peer, payload, size_bytes)

    def issue(stream: Stream) -> Completion:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        arrived = inbox.receive(stream, label, tensor)
        values[key] = Value.of(tensor, arrived)
        return arrived

    return issue


def _input_shape(workspace: Workspace, stage: int) -> tuple[int, ...]:
    resources = workspace.resources
    return resources.stages[stage].input_shape(resources.micro_batch_size, resources.sequence)


def _output_shape(workspace: Workspace, stage: int) -> tuple[int, ...]:
    resources = workspace.resources
    return resources.stages[stage].output_shape(resources.micro_batch_size, resources.sequence)
