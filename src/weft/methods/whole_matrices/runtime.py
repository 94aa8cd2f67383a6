"""The first part of a step on one rank, and the completion of matrices together with the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.program.program import Instruction
from weft.run.handlers.base import Issue
from weft.run.handlers.step import BegunStep, begin_step
from weft.run.methods import HandlerOf
from weft.run.state.stepped import Piece
from weft.run.state.votes import leaving_out
from weft.run.state.whole_matrices import WholeMatricesOptimizer
from weft.run.workspace import Workspace
from weft.sync.base import Group


def whole_matrices(workspace: Workspace, instruction: Instruction) -> Issue:
    """Run the first part of a stage's step and complete its matrices together with the sharing ranks."""
    stage, resources = instruction.stage, workspace.resources
    group, optimizer = resources.groups.collective[instruction.group], resources.optimizers[stage]
    pieces, gradient = resources.stepped[stage].pieces, resources.shards[stage].own_gradient
    assert isinstance(optimizer, WholeMatricesOptimizer), "its matrices are completed"

    def work(votes: Sequence[torch.Tensor], before: BegunStep | None) -> BegunStep:
        with leaving_out(optimizer, votes):
            optimizer.begin()
        complete(optimizer, pieces, gradient, group)
        return BegunStep(votes)

    return begin_step(workspace, instruction, work, first=True)


def complete(
    optimizer: WholeMatricesOptimizer, pieces: Sequence[Piece], own: torch.Tensor, group: Group
) -> None:
    """Complete the matrices that begin in this rank's range, and get the other pieces' updates.

    Args:
        pieces: this rank's, in the order of the flat tensors.
        own: the gradient of this rank's range; all ranges have its length.
    """
    length, stepped = len(own), {id(matrix) for matrix in optimizer.matrices}
    matrices = [piece for piece in pieces if id(piece.stepped) in stepped]
    # Of all its matrices, a rank has only the first one without its beginning, the last one without its end.
    continued = next((piece for piece in matrices if piece.start > 0), None)
    open_ended = next((piece for piece in matrices if piece.start == 0 and piece.end < _length(piece)), None)
    given, taken = [0] * group.size, [0] * group.size
    if continued is not None:
        given[continued.begins // length] = continued.end - continued.start
    if open_ended is not None:
        missing = range(open_ended.begins + open_ended.end, open_ended.begins + _length(open_ended))
        for place in range(group.place + 1, missing[-1] // length + 1):
            ends = min(missing.stop, (place + 1) * length)
            taken[place] = ends - max(missing.start, place * length)
    out = own[:0] if continued is None else _gradient(continued)
    arriving = own.new_empty(sum(taken))
    group.all_to_all_rows(arriving, out, taken, given)
    for piece in matrices:
        if piece.start == 0 and piece.end == _length(piece):
            optimizer.complete(_gradient(piece).view_as(piece.parameter))
    if open_ended is not None:
        begins = _gradient(open_ended)
        whole = torch.cat([begins, arriving])
        optimizer.complete(whole.view_as(open_ended.parameter))
        begins.copy_(whole[: len(begins)])
        arriving.copy_(whole[len(begins) :])
    group.all_to_all_rows(out, arriving, given, taken)


def _length(piece: Piece) -> int:
    return piece.parameter.numel()


def _gradient(piece: Piece) -> torch.Tensor:
    assert piece.stepped.grad is not None, "it is stepped"
    return piece.stepped.grad.view(-1)


PARTS = (HandlerOf(kind="whole_matrices", handler=whole_matrices),)
