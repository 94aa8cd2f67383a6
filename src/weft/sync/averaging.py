"""Weight averaging over replicas that step independently, with or without an outer step.

The outer step follows SlowMo (Wang et al., arXiv 1910.00643) and DiLoCo (Douillard et al., arXiv 2311.08105).
The change of the average since the last averaging is the gradient of a Nesterov step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft.sync.base import Meeting
from weft.sync.dense import Dense


class Averaging(Dense):
    """The mean of all replicas' weights. Gradients within one replica are summed as in `Dense`."""

    def average(self, weights: torch.Tensor, share: float, meeting: Meeting) -> None:
        """Replace `weights`, shape (n,), contiguous, by the mean over the group."""
        meeting.group.add_up(weights.mul_(share))


class OuterMomentum(Averaging):
    """An outer step from the weights of the last averaging towards the mean, with Nesterov momentum.

    All replicas get the same mean, so they keep the same momentum and take the same step.
    """

    def __init__(self, momentum: float, learning_rate: float) -> None:
        self._decay = momentum
        self._rate = learning_rate
        self._anchors: dict[int, torch.Tensor] = {}
        self._momenta: dict[int, torch.Tensor] = {}

    def begin(self, stage: int, flat: torch.Tensor) -> None:
        self._anchors[stage] = flat.clone()
        self._momenta[stage] = torch.zeros_like(flat)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        kept = {"anchor": self._anchors, "momentum": self._momenta}
        return {f"{name}/{stage}": flat for name, flats in kept.items() for stage, flat in flats.items()}

    def average(self, weights: torch.Tensor, share: float, meeting: Meeting) -> None:
        super().average(weights, share, meeting)
        anchor, momentum = self._anchors[meeting.stage], self._momenta[meeting.stage]
        moved = anchor - weights
        momentum.mul_(self._decay).add_(moved)
        anchor.sub_(moved.add_(momentum, alpha=self._decay), alpha=self._rate)
        weights.copy_(anchor)
