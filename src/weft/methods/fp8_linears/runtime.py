"""Products of a stage's blocks in 8 bits, through torchao (Micikevicius et al., arXiv 2209.05433).

The modules change and their parameters stay. So masters, buckets, shards and checkpoints have the same names
and types. A GPU multiplies in 8 bits. A CPU emulates it: operands are rounded to 8 bits, and multiplied in
fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from weft.describe.layer_choices import Value
from weft.errors import InputError, Violation
from weft.installed import remedy
from weft.methods.fp8_linears.options import NAME
from weft.methods.fp8_linears.products import MULTIPLE
from weft.run.stage.families.own import OwnStage
from weft.run.stage.layer_choices import RunChoice
from weft.run.stage.stage_module import StageModule


class Fp8Product(nn.Module):
    """A linear layer with operands in 8 bits; it has the parameters of the layer that it replaces.

    Args:
        whole: the layer; a `Conv1D` of `transformers` has its weight transposed.
        recipe: torchao's name of the recipe.
    """

    def __init__(self, whole: nn.Linear | Conv1D, recipe: str) -> None:
        super().__init__()
        self.weight, self.bias = whole.weight, whole.bias
        self._transposed = isinstance(whole, Conv1D)
        self._computed, self._emulated = (_settings(recipe, emulate=one) for one in (False, True))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return outputs (..., columns) of inputs (..., inner), in their precision."""
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        weight = self.weight if self._transposed else self.weight.t()
        products, config = self._computed if inputs.is_cuda else self._emulated
        output: torch.Tensor = matmul_with_hp_or_float8_args.apply(inputs, weight, products, config)
        return output if self.bias is None else output + self.bias


def _settings(recipe: str, *, emulate: bool) -> tuple[Any, Any]:
    """Return torchao's settings of the three products, and of the casts before them."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    with torch.device("meta"):
        layer = Float8Linear(MULTIPLE, MULTIPLE, bias=False, config=config)
    return layer.linear_mm_config, config


def convert(stage: nn.Module, layer: int, value: Value) -> None:
    """Convert the products of one layer of a stage whose weights have sides that 16 divides.

    Raises:
        InputError: without torchao, for a stage that tensor ranks divide, and for a layer without products.
    """
    found = list(_products(stage, layer))
    if not found:
        problem = f"layer {layer} has no linear product of multiples of {MULTIPLE} on one rank"
        raise InputError(Violation(NAME, problem))
    try:
        for parent, name, product in found:
            setattr(parent, name, Fp8Product(product, str(value)))
    except ImportError as error:
        problem = f"torchao cannot be imported ({error}): {remedy('fp8')}"
        raise InputError(Violation(NAME, problem)) from None


def _products(stage: nn.Module, layer: int) -> Iterator[tuple[nn.Module, str, nn.Linear | Conv1D]]:
    """Yield the linear layers to convert, each with its parent and its name there."""
    root: nn.Module
    if isinstance(stage, OwnStage):
        root, first = stage.layers, str(layer)
    elif isinstance(stage, StageModule) and stage.tensor.size == 1:
        root, first = stage.block(layer), ""
    else:
        return
    for path, module in root.named_modules():
        # Subclasses may be read by their parents, past their `forward`.
        if type(module) not in (nn.Linear, Conv1D) or (first and path.split(".")[0] != first):
            continue
        parent, _, name = path.rpartition(".")
        if all(side % MULTIPLE == 0 for side in module.weight.shape):
            yield root.get_submodule(parent), name, module


PARTS = (RunChoice(name=NAME, apply=convert),)
