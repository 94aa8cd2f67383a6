"""Messages between stages on different ranks."""

from __future__ import annotations

from weft.program.program import Instruction
from weft.run.channels import ACTIVATION, OUTPUT_GRADIENT
from weft.run.handlers.base import (
    INPUT_GRADIENT,
    OUTPUT,
    Transfer,
)
from weft.run.work_queue import Handle, Stamp
from weft.run.workspace import Workspace


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
