"""Checkpoints of stages that tensor or expert ranks divide: files hold whole tensors.

Ranks join their shares one tensor after the other. Each whole tensor stays on one rank, in turns. So a rank
keeps about as many bytes of whole tensors as of shares. For a load, a rank reads one whole tensor at a time
and takes its share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from weft.errors import RunError
from weft.run.parallel.tensor_layers import Share
from weft.run.parallel.tensor_stage import TensorParallel
from weft.training.checkpoint.tensor_folders import SafetensorsFolder


def shares_of(stages: Mapping[int, nn.Module]) -> dict[str, Share]:
    """Return the shares of this rank by parameter name."""
    return {
        name: share
        for module in stages.values()
        if isinstance(module, TensorParallel)
        for name, share in module.shares.items()
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
        # In host memory, where a device may have no room for the whole.
        whole = share.join(tensors[key].cpu())
        if share.has_turn(turn):
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
