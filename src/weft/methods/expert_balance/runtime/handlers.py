"""Sums of counts over ranks: the gradients of roots, and the loads of a step."""

from __future__ import annotations

import torch

from weft.methods.expert_balance.options import NAME
from weft.methods.expert_balance.runtime.state import COEFFICIENT, SHARE, ExpertBalance
from weft.program.program import NONE, Instruction
from weft.run.handlers.base import Issue
from weft.run.streams import Completion, Stream, Value
from weft.run.workspace import Workspace


def _state(workspace: Workspace) -> ExpertBalance:
    state = workspace.resources.methods[NAME]
    assert isinstance(state, ExpertBalance)
    return state


def expert_counts(workspace: Workspace, instruction: Instruction) -> Issue:
    """Sum the counts of a stage's experts over ranks, and make the gradients of its roots."""
    stage, part, label = instruction.stage, instruction.part, str(instruction)
    state, values = _state(workspace), workspace.values
    group = workspace.resources.groups.collective[instruction.group]
    layers, counted = tuple(state.layers[stage]), state.counted_together(stage, part)

    def issue(stream: Stream) -> Completion:
        shares = [[values[f"{SHARE}.{layer}", stage, one] for one in counted] for layer in layers]
        made: list[Value[torch.Tensor]] = [Value() for _ in layers]

        def work() -> None:
            roots = [[one.content for one in each] for each in shares]
            for value, gradient in zip(made, state.gradients(stage, part, roots, group), strict=True):
                value.content = gradient

        ended = stream.run(label, work, *(one for each in shares for one in each))
        for layer, value in zip(layers, made, strict=True):
            value.completion = ended
            values[f"{COEFFICIENT}.{layer}", stage, NONE if part == NONE else counted[0]] = value
        return ended

    return issue


def expert_loads(workspace: Workspace, instruction: Instruction) -> Issue:
    """Sum the tokens of all experts of the model over ranks, for the report."""
    label, state, values = str(instruction), _state(workspace), workspace.values
    group = workspace.resources.groups.collective[instruction.group]

    def issue(stream: Stream) -> Completion:
        shares = {
            layer: [values.pop((f"{SHARE}.{layer}", stage, one)) for one in state.micro_batches[stage]]
            for stage, layers in state.layers.items()
            for layer in layers
        }
        made: dict[str, Value[torch.Tensor]] = {name: Value() for name in state.told}

        def work() -> None:
            roots = {layer: [one.content for one in each] for layer, each in shares.items()}
            found = state.loads(roots, group)
            for name, value in made.items():
                value.content = found[name]

        ended = stream.run(label, work, *(one for each in shares.values() for one in each))
        for name, value in made.items():
            value.completion = ended
            values[name, NONE, NONE] = value
        return ended

    return issue
