"""Parameters and buffers of a rank's stages as whole tensors of the model, independent of the sharding.

If an optimizer steps other tensors than the stage's parameters, those tensors are saved. They are the ranges
of replicas that shard a stage, and masters in a higher precision than the parameters.
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
    """A buffer that receives one whole tensor of the model; without pieces it is the tensor itself."""

    whole: torch.Tensor
    pieces: tuple[Piece, ...] = ()

    def fill(self) -> None:
        """Copy the pieces' elements out of the whole tensor."""
        for piece in self.pieces:
            piece.stepped.detach().view(-1).copy_(self.whole.view(-1)[piece.start : piece.end])


def model_tensors(stages: Stages, stepped: Shards = NO_SHARDS) -> dict[str, torch.Tensor]:
    """Return this rank's tensors by name; every rank calls it, and together they name the whole model.

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
    """Return slots by name for the tensors that this rank has at least a part of."""
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
    """Copy weights and states between parameters of one name (tied weights); the last one is the source."""
    for *others, source in owners_by_name(stages, optimizers, stepped).values():
        state = source.optimizer.state.get(source.stepped, {})
        for copy in others:
            copy.stepped.detach().copy_(source.stepped.detach())
            copy.optimizer.state[copy.stepped] = {leaf: value.clone() for leaf, value in state.items()}
