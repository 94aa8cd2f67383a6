"""Gradients that lose all but the eight leading bits of each number before they are added."""

from __future__ import annotations

import torch
import torch.distributed as dist

from weft.sync.dense import Dense


class Rounded(Dense):
    """The sum over replicas of rounded gradients."""

    def reduce(self, gradient: torch.Tensor, group: dist.ProcessGroup) -> None:
        super().reduce(gradient.copy_(gradient.bfloat16()), group)

    def reduce_scatter(self, gradient: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return super().reduce_scatter(gradient.bfloat16().to(gradient.dtype), group)
