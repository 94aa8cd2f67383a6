"""The first part of a step on one rank, and the completion of matrices together with the others."""

from __future__ import annotations

import torch

from weft.program.program import Instruction
from weft.run.handlers.base import Issue
from weft.run.handlers.step import BegunStep, begin_step
from weft.run.methods import HandlerOf
from weft.run.state.stepped import Piece
from weft.run.state.votes import leaving_out
from weft.run.state.whole_matrices import WholeMatricesOptimizer
from weft.run.state.whole_pieces import complete_pieces
from weft.run.workspace import Workspace


def whole_matrices(workspace: Workspace, instruction: Instruction) -> Issue:
    """Run the first part of a stage's step and complete its matrices together with the sharing ranks."""
    stage, resources = instruction.stage, workspace.resources
    group, optimizer = resources.groups.collective[instruction.group], resources.optimizers[stage]
    pieces, gradient = resources.stepped[stage].pieces, resources.shards[stage].own_gradient
    assert isinstance(optimizer, WholeMatricesOptimizer), "its matrices are completed"

    def complete(_: Piece, matrix: torch.Tensor) -> None:
        optimizer.complete(matrix)

    def work(left_out: torch.Tensor | None, before: BegunStep | None) -> BegunStep:
        with leaving_out(optimizer, left_out):
            optimizer.begin()
        stepped = {id(matrix) for matrix in optimizer.matrices}
        matrices = [piece for piece in pieces if id(piece.stepped) in stepped]
        complete_pieces(matrices, gradient, group, complete)
        return BegunStep(left_out)

    return begin_step(workspace, instruction, work, first=True)


PARTS = (HandlerOf(kind="whole_matrices", handler=whole_matrices),)
