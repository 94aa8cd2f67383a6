"""States of a rank's optimizers as tensors of the model's own parameters, whoever steps which part of them.

`optimizer/transformer.h.0.ln_1.weight/exp_avg` is a state of the parameter `transformer.h.0.ln_1.weight` and
has its shape, or none (AdamW's count of steps). Where replicas share a stage out, a rank names the parameters
that begin in its share, and takes back the pieces of those that reach into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from weft.errors import RunError
from weft.run.state.stepped import SteppedWeights
from weft.training.checkpoint.tensor_shares import shares_of

Stages = Mapping[int, nn.Module]
Optimizers = Mapping[int, torch.optim.Optimizer]
Shards = Mapping[int, SteppedWeights]

NO_SHARDS: Shards = MappingProxyType({})
_PREFIX = "optimizer"


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for one state, to be read whole: `state[leaf]` takes elements `start` to `end` of it."""

    state: dict[str, Any]
    leaf: str
    whole: torch.Tensor
    start: int
    end: int
    shape: torch.Size

    def fill(self) -> None:
        """Give the optimizer what was read."""
        whole = self.whole
        if whole.ndim and self.end - self.start < whole.numel():
            # A copy, so that the rest of the whole is given back.
            whole = whole.flatten()[self.start : self.end].clone()
        self.state[self.leaf] = whole.view(self.shape) if whole.ndim else whole


def optimizer_tensors(
    stages: Stages, optimizers: Optimizers, shards: Shards = NO_SHARDS
) -> dict[str, torch.Tensor]:
    """The states by name. Every rank of the job calls it; together they name all states of all parameters."""
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
    """Room for those of the `known` states, described by name, of which this rank steps a part.

    Optimizers make their states at their first step, so a fresh one has none to fill.

    Raises:
        RunError: for a state that is neither a number nor as its parameter, which ranks cannot share out.
    """
    owners = {name: found[-1] for name, found in owners_by_name(stages, optimizers, shards).items()}
    divided = shares_of(stages)
    slots: dict[str, Slot] = {}
    for key, metadata in known.items():
        head, _, rest = key.partition("/")
        name, _, leaf = rest.rpartition("/")
        if head == _PREFIX and name in owners:
            owner = owners[name]
            # AdamW keeps its step count, a scalar, on the host.
            device = owner.stepped.device if metadata.size else torch.device("cpu")
            dtype = owner.stepped.dtype if metadata.size else metadata.properties.dtype
            size = metadata.size
            if size and name in divided:
                size = divided[name].own_shape(size)
            if size and (size != owner.parameter.shape or not metadata.properties.dtype.is_floating_point):
                has = f"{metadata.properties.dtype} of shape {list(size)}"
                raise RunError(f"{key}: {has} cannot be given back to an optimizer; states are as parameters")
            whole = torch.empty(size, dtype=dtype, device=device)
            state = owner.optimizer.state[owner.stepped]
            slots[key] = Slot(state, leaf, whole, owner.start, owner.end, owner.stepped.shape)
    return slots


@dataclass(frozen=True, slots=True)
class Owner:
    """The optimizer that steps elements `start` to `end` of a parameter on this rank, as `stepped`."""

    optimizer: torch.optim.Optimizer
    parameter: nn.Parameter
    stepped: nn.Parameter
    start: int
    end: int


def owners_by_name(stages: Stages, optimizers: Optimizers, shards: Shards) -> dict[str, list[Owner]]:
    """Who steps a parameter of that name on this rank, by stage: several where it has copies."""
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
