"""Weights in few bits: packed once, and unpacked for each product.

Blocks of 64 weights along the inner side of a product have a scale in fp32: their largest absolute value.
NF4 has sixteen values, quantiles of a normal distribution (Dettmers et al., QLoRA, arXiv 2305.14314, eq. 4).
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import torch
from torch import nn

from weft.methods.lora.few_bits import BLOCK, rows_at_once
from weft.methods.lora.options import Base
from weft.run.parallel.function import Function
from weft.run.parallel.tensor_layers import LinearProduct

# The probability of the largest value, as the paper's own code has it.
_LARGEST = 0.9677083
_LARGEST_INTEGER = 127


def normal_values() -> list[float]:
    """Return the sixteen values of NF4, rising: seven below zero, zero, and eight above."""
    below, above = (
        [NormalDist().inv_cdf(_LARGEST + (0.5 - _LARGEST) * step / count) for step in range(count)]
        for count in (7, 8)
    )
    return [-one / below[0] for one in below] + [0.0] + [one / above[0] for one in reversed(above)]


class PackedWeight(nn.Module):
    """The weight of a frozen linear layer in few bits; a call multiplies (..., inner) by it.

    Args:
        weight: (columns, inner), in any floating point type.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    pairs: torch.Tensor

    def __init__(self, weight: torch.Tensor, base: Base) -> None:
        super().__init__()
        self.columns, self.inner = weight.shape
        self.base = base
        values = torch.tensor(normal_values())
        # The two values of every byte.
        pairs = torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1)
        parts = [self._packed(rows, values) for rows in weight.detach().split(rows_at_once(self.inner))]
        codes, scales = (torch.cat(some) for some in zip(*parts, strict=True))
        for name, tensor in (("codes", codes), ("scales", scales), ("pairs", pairs)):
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Product.apply(values, self)
        return product

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight, (columns, inner)."""
        blocks = self.scales.shape[1]
        whole = torch.empty(self.columns, blocks, BLOCK, dtype=dtype, device=self.codes.device)
        chunks = zip(
            *(one.split(rows_at_once(self.inner)) for one in (self.codes, self.scales, whole)), strict=True
        )
        for codes, scales, result in chunks:
            values = codes if self.base == "int8" else nn.functional.embedding(codes.int(), self.pairs)
            torch.mul(values.view(*scales.shape, BLOCK), scales.unsqueeze(-1), out=result)
        return whole.view(self.columns, blocks * BLOCK)[:, : self.inner]

    def _packed(self, rows: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales of some rows; the last block of a row may end with zeros."""
        missing = -self.inner % BLOCK
        blocks = nn.functional.pad(rows.cpu().float(), (0, missing)).view(len(rows), -1, BLOCK)
        largest = blocks.abs().amax(-1)
        shares = blocks / largest.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
        if self.base == "int8":
            return (shares * _LARGEST_INTEGER).round().to(torch.int8).flatten(1), largest / _LARGEST_INTEGER
        # Three times as fast as `torch.bucketize`.
        codes = torch.zeros(shares.shape, dtype=torch.uint8)
        for border in ((values[1:] + values[:-1]) / 2).tolist():
            codes += shares > border
        codes = codes.flatten(1)
        return codes[:, 0::2] * 16 + codes[:, 1::2], largest


def pack(product: LinearProduct, base: Base) -> None:
    """Replace the weight of a linear layer with the same one in few bits."""
    weight = product.weight.t() if product.transposed else product.weight
    product.multiply = PackedWeight(weight, base)
    del product.weight


class _Product(Function):
    """A product with a packed weight, whose backward pass unpacks it again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        ctx.weight = weight
        return nn.functional.linear(values, weight.unpacked(values.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ ctx.weight.unpacked(gradient.dtype), None
