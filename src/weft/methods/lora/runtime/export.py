"""Low-rank products of a checkpoint: merged with the model's weights, or as an adapter of peft."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from weft.describe.block_products import block_products
from weft.describe.model import ModelConfig
from weft.describe.plan import Choice
from weft.methods.lora.options import NAME, A, B, LowRank, read_options
from weft.methods.lora.runtime.few_bits import PackedWeight
from weft.training.checkpoint.tensor_folders import Shape, TensorFolder
from weft.training.interchange.adapters import Adapter, AdapterOf

_WEIGHT = ".weight"


class MergedFolder:
    """The tensors of a checkpoint, with low-rank products merged: weight + scale * B A, summed in fp32.

    Weights are those that training has multiplied by: packed ones are unpacked.
    """

    def __init__(self, folder: TensorFolder, config: ModelConfig, low_rank: LowRank) -> None:
        self.path: Path = folder.path
        self.shapes: Mapping[str, Shape] = folder.shapes
        self._folder = folder
        self._low_rank = low_rank
        self._products = {one.name for one in block_products(config)}
        # Such weights lie as (inner, columns).
        self._transposed = config.family == "gpt"

    def read(self, name: str) -> torch.Tensor:
        weight = self._folder.read(name)
        layer = name.removesuffix(_WEIGHT)
        down, up = (f"{layer}.{factor}{_WEIGHT}" for factor in (A, B))
        is_product = name.endswith(_WEIGHT) and layer.rpartition(".")[2] in self._products
        base = self._low_rank.base if is_product else None
        if base is None and down not in self.shapes:
            return weight
        whole = weight.float().T if self._transposed else weight.float()
        if base is not None:
            whole = PackedWeight(whole, base).unpacked(torch.float32)
        if down in self.shapes:
            added = self._folder.read(up).float() @ self._folder.read(down).float()
            whole = whole.add(added, alpha=self._low_rank.scale)
        return (whole.T if self._transposed else whole).to(weight.dtype)


def _merged(source: TensorFolder, config: ModelConfig, choice: Choice) -> TensorFolder:
    return MergedFolder(source, config, read_options(choice))


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
            "lora_dropout": low_rank.dropout,
            "bias": "none",
            # The last name before that of the factor.
            "target_modules": sorted({name.split(".")[-3] for name in found}),
            "fan_in_fan_out": config.family == "gpt",
            "inference_mode": True,
        },
        names={f"base_model.model.{name}": name for name in found},
    )


ADAPTER = AdapterOf(method=NAME, merged=_merged, adapter=_adapter)
