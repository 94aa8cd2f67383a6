"""Parameters and buffers of a rank's stages as whole tensors of the model, whoever steps which part of them.

Of a stage whose optimizer steps something else than its parameters, what it steps is what counts: the own
ranges of replicas that share out a stage, and masters in a higher precision than that of the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from weft.run.state.stepped import Piece
from weft.training.checkpoint.optimizer_states import NO_SHARDS, Shards, owners_by_name

Stages = Mapping[int, nn.Module]


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Room for one tensor of the model, to be read whole; without pieces it is the tensor itself."""

    whole: torch.Tensor
    pieces: tuple[Piece, ...] = ()

    def fill(self) -> None:
        """Give the pieces what was read."""
        for piece in self.pieces:
            piece.stepped.detach().view(-1).copy_(self.whole.view(-1)[piece.start : piece.end])


def model_tensors(stages: Stages, stepped: Shards = NO_SHARDS) -> dict[str, torch.Tensor]:
    """Return the tensors by name. Every rank of the job calls it; together they name all of the model.

    Of a stage in `stepped`, a rank names the parameters that begin in its own range.
    """
    found: dict[str, torch.Tensor] = {}
    for stage in sorted(stages):
        one = stepped.get(stage)
        weights = {} if one is None else one.whole_weights()
        elsewhere = set() if one is None else {id(parameter) for parameter in one.parameters}
        for name, tensor in stages[stage].state_dict(keep_vars=True).items():
            if id(tensor) not in elsewhere:
                found[name] = tensor.detach()
            elif tensor in weights:
                found[name] = weights[tensor]
    return found


def model_slots(stages: Stages, stepped: Shards = NO_SHARDS) -> dict[str, WeightSlot]:
    """Room by name for the tensors of which this rank has a part."""
    slots: dict[str, WeightSlot] = {}
    for stage in sorted(stages):
        one = stepped.get(stage)
        elsewhere = set() if one is None else {id(parameter) for parameter in one.parameters}
        pieces = {} if one is None else {id(piece.parameter): piece for piece in one.pieces}
        for name, tensor in stages[stage].state_dict(keep_vars=True).items():
            if id(tensor) not in elsewhere:
                slots[name] = WeightSlot(tensor.detach())
            elif (piece := pieces.get(id(tensor))) is not None:
                like = piece.stepped
                whole = torch.empty(tensor.shape, dtype=like.dtype, device=like.device)
                slots[name] = WeightSlot(whole, (piece,))
    return slots


def fill_copies(
    stages: Stages, optimizers: Mapping[int, torch.optim.Optimizer], stepped: Shards = NO_SHARDS
) -> None:
    """Give all parameters of one name on this rank, copies of tied weights, what the last one was given."""
    for *others, source in owners_by_name(stages, optimizers, stepped).values():
        state = source.optimizer.state.get(source.stepped, {})
        for copy in others:
            copy.stepped.detach().copy_(source.stepped.detach())
            copy.optimizer.state[copy.stepped] = {leaf: value.clone() for leaf, value in state.items()}
