"""Low-rank products of a checkpoint: merged with the model's weights, or as an adapter of peft."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from weft.describe.model import ModelConfig
from weft.describe.plan import Choice
from weft.methods.lora.options import NAME, A, B, read_options
from weft.training.checkpoint.tensor_folders import Shape, TensorFolder
from weft.training.interchange.adapters import Adapter, AdapterOf

_WEIGHT = ".weight"


class MergedFolder:
    """The tensors of a checkpoint, with low-rank products merged: weight + scale * B A, summed in fp32.

    Args:
        transposed: True if weights lie as (inner, columns).
    """

    def __init__(self, folder: TensorFolder, scale: float, *, transposed: bool) -> None:
        self.path: Path = folder.path
        self.shapes: Mapping[str, Shape] = folder.shapes
        self._folder = folder
        self._scale = scale
        self._transposed = transposed

    def read(self, name: str) -> torch.Tensor:
        weight = self._folder.read(name)
        down, up = (f"{name.removesuffix(_WEIGHT)}.{factor}{_WEIGHT}" for factor in (A, B))
        if down not in self.shapes:
            return weight
        added = self._folder.read(up).float() @ self._folder.read(down).float()
        whole = weight.float().add(added.T if self._transposed else added, alpha=self._scale)
        return whole.to(weight.dtype)


def _merged(source: TensorFolder, config: ModelConfig, choice: Choice) -> TensorFolder:
    return MergedFolder(source, read_options(choice).scale, transposed=config.family == "gpt")


def _adapter(source: TensorFolder, config: ModelConfig, choice: Choice) -> Adapter:
    """Return the adapter, with peft's keys and names."""
    low_rank = read_options(choice)
    ends = tuple(f".{factor}{_WEIGHT}" for factor in (A, B))
    # A checkpoint also has the states of the optimizer, under the same names after a path.
    found = [name for name in source.shapes if name.endswith(ends) and "/" not in name]
    return Adapter(
        configuration={
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": low_rank.rank,
            "lora_alpha": low_rank.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            # The last name before that of the factor.
            "target_modules": sorted({name.split(".")[-3] for name in found}),
            "fan_in_fan_out": config.family == "gpt",
            "inference_mode": True,
        },
        names={f"base_model.model.{name}": name for name in found},
    )


ADAPTER = AdapterOf(method=NAME, merged=_merged, adapter=_adapter)
