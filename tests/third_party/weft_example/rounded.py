"""Gradients that lose all but the eight leading bits of each number before they are added."""

from __future__ import annotations

import torch

from weft.sync.base import Meeting
from weft.sync.dense import Dense


class Rounded(Dense):
    """The sum over replicas of rounded gradients."""

    def reduce(self, gradient: torch.Tensor, meeting: Meeting) -> None:
        super().reduce(gradient.copy_(gradient.bfloat16()), meeting)

    def reduce_scatter(self, gradient: torch.Tensor, meeting: Meeting) -> torch.Tensor:
        return super().reduce_scatter(gradient.bfloat16().to(gradient.dtype), meeting)
