"""The exchanges of tensor ranks at the borders between segments."""

from __future__ import annotations

import torch

from weft.program.program import Instruction
from weft.run.handlers.base import (
    BORDER_GRADIENT,
    SEGMENT_GRADIENT,
    SEGMENT_INPUT,
    SEGMENT_OUTPUT,
    Issue,
)
from weft.run.methods import HandlerOf
from weft.run.streams import Completion, Stream, Value
from weft.run.workspace import Workspace


def tensor_forward(workspace: Workspace, instruction: Instruction) -> Issue:
    """Exchange the output that a forward segment leaves for the next one."""
    return _exchange(workspace, instruction, SEGMENT_OUTPUT, SEGMENT_INPUT, backward=False)


def tensor_backward(workspace: Workspace, instruction: Instruction) -> Issue:
    """Exchange the gradient that a backward segment leaves for the one before it."""
    return _exchange(workspace, instruction, SEGMENT_GRADIENT, BORDER_GRADIENT, backward=True)


def _exchange(
    workspace: Workspace, instruction: Instruction, left_as: str, made_as: str, *, backward: bool
) -> Issue:
    stage, number, label = instruction.stage, instruction.micro_batch, str(instruction)
    group, values = workspace.resources.groups.collective[instruction.group], workspace.values
    exchange = workspace.segments[stage].exchanger(instruction.part, group, backward=backward)

    def issue(stream: Stream) -> Completion:
        left: Value[torch.Tensor] = values.pop((left_as, stage, number))
        made: Value[torch.Tensor] = Value()
        values[made_as, stage, number] = made

        def work() -> None:
            made.content = exchange(left.content)

        made.completion = stream.run(label, work, left)
        return made.completion

    return issue


PARTS = (
    HandlerOf(kind="tensor_forward", handler=tensor_forward),
    HandlerOf(kind="tensor_backward", handler=tensor_backward),
)
