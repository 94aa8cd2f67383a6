"""Checkpoints of stages that tensor or expert ranks divide: files hold whole tensors.

Ranks join their shares one tensor after the other. Each whole tensor stays on one rank, in turns. So a rank
keeps about as many bytes of whole tensors as of shares. For a load, a rank reads one whole tensor at a time
and takes its share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from weft.errors import RunError
from weft.run.parallel.replica_ranks import ReplicaRanks
from weft.run.parallel.tensor_layers import Division
from weft.run.parallel.tensor_stage import TensorParallel
from weft.training.checkpoint.tensor_folders import SafetensorsFolder


@dataclass(frozen=True, slots=True)
class Share:
    """The division of a parameter, and of every state of its shape, over ranks of a replica."""

    division: Division
    ranks: ReplicaRanks

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        return self.division.own(whole, self.ranks)

    def own_shape(self, whole: torch.Size) -> torch.Size:
        return self._with_length(whole, self.division.own_length(self.ranks))

    def whole_shape(self, own: torch.Size) -> torch.Size:
        return self._with_length(own, self.division.length)

    def _with_length(self, shape: torch.Size, length: int) -> torch.Size:
        axis = self.division.axis
        return torch.Size((*shape[:axis], length, *shape[axis + 1 :]))

    def join(self, own: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor, in host memory; every rank calls it."""
        return self.division.joined(list(self.ranks.gather(own.cpu())), self.ranks)


def shares_of(stages: Mapping[int, nn.Module]) -> dict[str, Share]:
    """Return the shares of this rank by parameter name."""
    return {
        name: Share(division, module.dividing)
        for module in stages.values()
        if isinstance(module, TensorParallel)
        for name, division in module.divisions.items()
    }


def parameter_of(key: str) -> str:
    """Return the parameter name of a checkpoint key.

    It is the key itself, or NAME of `optimizer/NAME/STATE` or `method/METHOD/NAME/STATE`.
    """
    parts = key.split("/")
    return parts[-2] if len(parts) in (3, 4) else key


def join_shares(
    stages: Mapping[int, nn.Module], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Join the ranks' shares to whole tensors by name, each on one rank; every rank calls it."""
    shares = shares_of(stages)
    found: dict[str, torch.Tensor] = {}
    for turn, key in enumerate(sorted(tensors)):
        share = shares.get(parameter_of(key))
        if share is None or not tensors[key].ndim:
            found[key] = tensors[key]
            continue
        whole = share.join(tensors[key])
        if turn % share.ranks.size == share.ranks.place:
            found[key] = whole
    return found


def read_shares(
    path: Path,
    stages: Mapping[int, nn.Module],
    rooms: Mapping[str, torch.Tensor],
    progress: Callable[[], None],
) -> set[str]:
    """Fill the shares among `rooms` from a checkpoint and return their names.

    It calls `progress` after each tensor.

    Raises:
        RunError: if a tensor is missing or has another shape.
    """
    shares = shares_of(stages)
    wanted = {key for key, room in rooms.items() if room.ndim and parameter_of(key) in shares}
    folder = SafetensorsFolder(path) if wanted else None
    for key in sorted(wanted):
        assert folder is not None, "there are tensors to read"
        share = shares[parameter_of(key)]
        needed = share.whole_shape(rooms[key].shape)
        if key not in folder.shapes:
            raise RunError(f"{path}: {key} is missing")
        if (has := folder.shapes[key]) != tuple(needed):
            raise RunError(f"{path}: {key} has the shape {list(has)}, this model's is {list(needed)}")
        rooms[key].copy_(share.own(folder.read(key)))
        progress()
    return wanted
