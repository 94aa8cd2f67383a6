"""Weights averaged over replicas that step by themselves, with or without an outer step.

The outer step is that of Wang et al., SlowMo (arXiv 1910.00643), and Douillard et al., DiLoCo
(arXiv 2311.08105): what the average has moved since the last one is the gradient of a Nesterov step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft.sync.base import Meeting
from weft.sync.collectives import add_up
from weft.sync.dense import Dense


class Averaging(Dense):
    """The mean of all replicas' weights; what a replica adds up within itself, it adds up densely."""

    def average(self, weights: torch.Tensor, share: float, meeting: Meeting) -> None:
        """Replace `weights` (shape (n,), contiguous) by their mean over the group, in rank order."""
        add_up(weights.mul_(share), meeting.group)


class OuterMomentum(Averaging):
    """A step from the weights of the last averaging towards the mean, with Nesterov's momentum.

    All replicas get the same mean, so that all remember and step the same.
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
