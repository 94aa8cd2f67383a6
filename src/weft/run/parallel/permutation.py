"""Rows in another order, and back in the backward pass without a sum."""

from __future__ import annotations

from typing import Any

import torch

from weft.run.parallel.function import Function


def inverse(order: torch.Tensor) -> torch.Tensor:
    """Return the place of each position in an order, (n,)."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def permuted(rows: torch.Tensor, order: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return rows (n, ...) by an order, whose inverse is `place`."""
    found: torch.Tensor = _Permuted.apply(rows, order, place)
    return found


class _Permuted(Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.place = place
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.index_select(0, ctx.place), None, None
