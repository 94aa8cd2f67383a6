"""The handlers of K-FAC: curvature of micro-batches, sums over replicas, inverses, preconditioning."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.errors import RunError
from weft.methods.kfac.linears import FACTORS
from weft.methods.kfac.options import NAME
from weft.methods.kfac.report import AGE
from weft.methods.kfac.runtime.stage_curvature import StageCurvature
from weft.methods.kfac.runtime.state import Kfac
from weft.program.program import NONE, Instruction
from weft.run.handlers.base import GRADIENT, Issue
from weft.run.streams import THERE, Completion, Stream, Value
from weft.run.workspace import Workspace

# The last work on the factors of a side in a stage.
FACTORS_OF = ("input_factor", "output_factor")
INVERSES = "inverses"


def _state(workspace: Workspace) -> Kfac:
    state = workspace.resources.methods[NAME]
    assert isinstance(state, Kfac)
    return state


def _curvature(workspace: Workspace, instruction: Instruction) -> StageCurvature:
    return _state(workspace).stages[instruction.stage]


def curvature(workspace: Workspace, instruction: Instruction, side: int) -> Issue:
    """Add what a micro-batch has left in a layer to the layer's sums."""
    label, found = str(instruction), _curvature(workspace, instruction)
    position, micro_batch = instruction.part, instruction.micro_batch
    key = (FACTORS_OF[side], instruction.stage, position)

    def issue(stream: Stream) -> Completion:
        def work() -> None:
            found.add(side, position, micro_batch)

        ended = stream.run(label, work, workspace.values.get(key, THERE))
        workspace.values[key] = Value.of(None, ended)
        return ended

    return issue


def reduced_curvature(workspace: Workspace, instruction: Instruction, side: int) -> Issue:
    """Add up a layer's sums over all ranks of its stage; of symmetric matrices, one half."""
    label, position = str(instruction), instruction.part
    layer = _curvature(workspace, instruction).layers[position]
    factors = layer.factors(side)
    group = workspace.resources.groups.collective[instruction.group]
    key = (FACTORS_OF[side], instruction.stage, position)

    def issue(stream: Stream) -> Completion:
        def work() -> None:
            halves = [one.sum[_half(one.sum)] for one in factors]
            flat = torch.cat(halves)
            group.all_reduce(flat)
            for one, half in zip(factors, flat.split([len(half) for half in halves]), strict=True):
                one.sum[_half(one.sum)] = half
                one.sum.T[_half(one.sum)] = half
            layer.complete(side)

        ended = stream.run(label, work, workspace.values.get(key, THERE))
        workspace.values[key] = Value.of(None, ended)
        return ended

    return issue


def _half(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    row, column = torch.tril_indices(*matrix.shape, device=matrix.device)
    return row, column


def inverse(workspace: Workspace, instruction: Instruction, side: int) -> Issue:
    """Invert one factor of a layer.

    Raises:
        RunError: when it is not finite, or stays indefinite.
    """
    label, (position, number) = str(instruction), divmod(instruction.part, FACTORS)
    layer = _curvature(workspace, instruction).layers[position]
    keys = [(name, instruction.stage, position) for name in FACTORS_OF]

    def issue(stream: Stream) -> Completion:
        def work() -> None:
            try:
                layer.invert(side, number)
            except FloatingPointError as error:
                raise RunError(f"{label}: {error}") from None

        ended = stream.run(label, work, *(workspace.values.get(key, THERE) for key in keys))
        # Sums of the next window wait for it on both sides, whose means it reads.
        for key in (*keys, (INVERSES, instruction.stage, NONE)):
            workspace.values[key] = Value.of(None, ended)
        return ended

    return issue


def precondition(workspace: Workspace, instruction: Instruction) -> Issue:
    """Multiply the gradient of a stage by the inverses that it has."""
    return _preconditioned(workspace, instruction, _curvature(workspace, instruction).precondition)


def precondition_shards(workspace: Workspace, instruction: Instruction) -> Issue:
    """Multiply the gradient of which the ranks of a group have ranges."""
    resources, stage = workspace.resources, instruction.stage
    found, pieces = _curvature(workspace, instruction), resources.stepped[stage].pieces
    own, group = resources.shards[stage].own_gradient, resources.groups.collective[instruction.group]
    return _preconditioned(workspace, instruction, lambda: found.precondition_pieces(pieces, own, group))


def _preconditioned(workspace: Workspace, instruction: Instruction, multiply: Callable[[], None]) -> Issue:
    stage, label = instruction.stage, str(instruction)
    layers = tuple(_curvature(workspace, instruction).layers.values())

    def issue(stream: Stream) -> Completion:
        step, age = workspace.step, Value[torch.Tensor]()

        def work() -> None:
            multiply()
            age.content = torch.stack([layer.age(step) for layer in layers]).sum()

        reads = workspace.latest(GRADIENT, stage), workspace.latest(INVERSES, stage)
        age.completion = stream.run(label, work, *reads)
        workspace.values[GRADIENT, stage, NONE] = Value.of(None, age.completion)
        workspace.values[AGE, stage, NONE] = age
        return age.completion

    return issue
