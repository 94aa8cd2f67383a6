"""The outer step of DiLoCo."""

from __future__ import annotations

import torch

from weft.methods.diloco.options import NAME, DilocoOptions
from weft.methods.local_averaging.runtime.outer_step import LocalRound, OuterStep
from weft.sync.base import SynchroniserOf


class Diloco(OuterStep):
    """Nesterov's step with `x - mean` as the gradient (Douillard et al., arXiv 2311.08105, algorithm 1)."""

    def __init__(self, options: DilocoOptions) -> None:
        super().__init__()
        self._decay, self._rate = options.outer_momentum, options.outer_learning_rate

    def agreed(self, mean: torch.Tensor, done: LocalRound) -> torch.Tensor:
        anchor, momentum = self.states[done.name]
        moved = anchor - mean
        momentum.mul_(self._decay).add_(moved)
        return anchor.sub_(moved.add_(momentum, alpha=self._decay), alpha=self._rate)


PARTS = (SynchroniserOf(name=NAME, make=Diloco),)
