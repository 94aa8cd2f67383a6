"""Parameters, buffers and optimizer states of a rank's stages as whole tensors of the model.

They are independent of the division over ranks. If an optimizer steps other tensors than the stage's
parameters, those tensors are saved. They are the ranges of replicas that shard a stage, and masters in a
higher precision than the parameters.

`optimizer/transformer.h.0.ln_1.weight/exp_avg` is a state of the parameter `transformer.h.0.ln_1.weight`. It
has the parameter's shape or is a scalar (AdamW's step count). If replicas shard a stage, a rank names the
parameters that begin in its shard. It takes back its pieces of all parameters that reach into the shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from weft.errors import RunError
from weft.run.stage.stage_module import frozen_names
from weft.run.state.stepped import Piece, SteppedWeights
from weft.training.checkpoint.tensor_shares import shares_of

Stages = Mapping[int, nn.Module]
Optimizers = Mapping[int, torch.optim.Optimizer]
Shards = Mapping[int, SteppedWeights]

NO_SHARDS: Shards = MappingProxyType({})
_PREFIX = "optimizer"


@dataclass(frozen=True, slots=True)
class Slot:
    """A buffer that receives one whole state; the owners' `state[leaf]` take their elements of it."""

    owners: tuple[Owner, ...]
    leaf: str
    whole: torch.Tensor

    def fill(self) -> None:
        """Give the optimizers their elements of the state, each tensors of its own."""
        for owner in self.owners:
            own = self.whole
            if own.ndim:
                own = own.flatten()[owner.start : owner.end]
            if len(self.owners) > 1 or own.numel() < self.whole.numel():
                # A copy frees the rest of the whole tensor.
                own = own.clone()
            owner.optimizer.state[owner.stepped][self.leaf] = (
                own.view(owner.stepped.shape) if own.ndim else own
            )


def optimizer_tensors(
    stages: Stages, optimizers: Optimizers, shards: Shards = NO_SHARDS
) -> dict[str, torch.Tensor]:
    """Return this rank's states by name; every rank calls it, and together they name every state."""
    found: dict[str, torch.Tensor] = {}
    for stage in sorted(stages):
        states = shards[stage].whole_states() if stage in shards else optimizers[stage].state
        found |= {
            f"{_PREFIX}/{name}/{leaf}": value
            for name, parameter in stages[stage].named_parameters()
            for leaf, value in states.get(parameter, {}).items()
        }
    return found


def optimizer_slots(
    stages: Stages, optimizers: Optimizers, known: Mapping[str, Any], shards: Shards = NO_SHARDS
) -> dict[str, Slot]:
    """Return slots, by name, for the `known` states that this rank steps at least a part of.

    `known` maps names to metadata. A fresh optimizer has no states to fill: it makes them at its first step.

    Raises:
        RunError: for a state that is neither a scalar nor of its parameter's shape; ranks cannot shard it.
    """
    owners = owners_by_name(stages, optimizers, shards)
    divided = shares_of(stages)
    slots: dict[str, Slot] = {}
    for key, metadata in known.items():
        head, _, rest = key.partition("/")
        name, _, leaf = rest.rpartition("/")
        if head == _PREFIX and name in owners:
            owner = owners[name][-1]
            # AdamW keeps its step count, a scalar, on the host unless it is fused.
            on_device = metadata.size or owner.optimizer.defaults.get("fused")
            device = owner.stepped.device if on_device else torch.device("cpu")
            dtype = owner.stepped.dtype if metadata.size else metadata.properties.dtype
            size = metadata.size
            if size and name in divided:
                size = divided[name].own_shape(size)
            if size and (size != owner.parameter.shape or not metadata.properties.dtype.is_floating_point):
                has = f"{metadata.properties.dtype} of shape {list(size)}"
                raise RunError(f"{key}: {has} cannot be given back to an optimizer; states are as parameters")
            slots[key] = Slot(tuple(owners[name]), leaf, torch.empty(size, dtype=dtype, device=device))
    return slots


@dataclass(frozen=True, slots=True)
class Owner:
    """The optimizer that steps elements `start` to `end` of a parameter on this rank, as `stepped`."""

    optimizer: torch.optim.Optimizer
    parameter: nn.Parameter
    stepped: nn.Parameter
    start: int
    end: int

    @property
    def is_whole(self) -> bool:
        return self.end - self.start == self.parameter.numel()


def owners_by_name(stages: Stages, optimizers: Optimizers, shards: Shards) -> dict[str, list[Owner]]:
    """Return the owners on this rank by parameter name, in stage order; tied weights have several."""
    found: dict[str, list[Owner]] = {}
    for stage in stages:
        for name, owner in _owners(stage, stages, optimizers, shards):
            found.setdefault(name, []).append(owner)
    return found


def _owners(
    stage: int, stages: Stages, optimizers: Optimizers, shards: Shards
) -> Iterator[tuple[str, Owner]]:
    optimizer = optimizers[stage]
    names = {parameter: name for name, parameter in stages[stage].named_parameters()}
    if stage not in shards:
        for parameter, name in names.items():
            yield name, Owner(optimizer, parameter, parameter, 0, parameter.numel())
        return
    for piece in shards[stage].pieces:
        yield names[piece.parameter], Owner(optimizer, piece.parameter, piece.stepped, piece.start, piece.end)


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """A buffer that receives one whole tensor of the model.

    `copies` are other tensors with the same values, and `pieces` take their elements of them.
    """

    whole: torch.Tensor
    copies: tuple[torch.Tensor, ...] = ()
    pieces: tuple[Piece, ...] = ()

    def fill(self) -> None:
        """Give the copies and pieces their elements of the whole tensor."""
        for copy in self.copies:
            copy.copy_(self.whole)
        for piece in self.pieces:
            piece.stepped.detach().view(-1).copy_(self.whole.view(-1)[piece.start : piece.end])


def _kept(stage: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield a stage's tensors by name, without frozen parameters: every start makes or reads them anew."""
    frozen = frozen_names(stage)
    for name, tensor in stage.state_dict(keep_vars=True).items():
        if name not in frozen:
            yield name, tensor


def model_tensors(stages: Stages, stepped: Shards = NO_SHARDS) -> dict[str, torch.Tensor]:
    """Return this rank's tensors by name; every rank calls it, and together they name the whole model,
    without frozen parameters.

    Of a stage in `stepped`, a rank names the parameters that begin in its own range.
    """
    found: dict[str, torch.Tensor] = {}
    for stage in sorted(stages):
        one = stepped.get(stage)
        weights = {} if one is None else one.whole_weights()
        elsewhere = set() if one is None else {id(parameter) for parameter in one.parameters}
        for name, tensor in _kept(stages[stage]):
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
        for name, tensor in _kept(stages[stage]):
            # Tied weights of several stages have one name.
            slot = slots.get(name)
            if id(tensor) not in elsewhere:
                whole = tensor.detach()
                slots[name] = (
                    WeightSlot(whole) if slot is None else replace(slot, copies=(*slot.copies, whole))
                )
            elif (piece := pieces.get(id(tensor))) is not None:
                like = piece.stepped
                if slot is None:
                    slot = WeightSlot(torch.empty(tensor.shape, dtype=like.dtype, device=like.device))
                slots[name] = replace(slot, pieces=(*slot.pieces, piece))
    return slots


def fill_copies(stages: Stages, optimizers: Optimizers, stepped: Shards = NO_SHARDS) -> None:
    """Copy weights and states between whole copies of one name (tied weights); the last one is the source."""
    for owners in owners_by_name(stages, optimizers, stepped).values():
        *others, source = [one for one in owners if one.is_whole] or owners[-1:]
        state = source.optimizer.state.get(source.stepped, {})
        for copy in others:
            copy.stepped.detach().copy_(source.stepped.detach())
            copy.optimizer.state[copy.stepped] = {leaf: value.clone() for leaf, value in state.items()}
