"""The outer step of slow momentum."""

from __future__ import annotations

import torch

from weft.methods.local_averaging.runtime.outer_step import LocalRound, OuterStep
from weft.methods.slow_momentum.options import NAME, SlowMomentumOptions
from weft.sync.base import SynchroniserOf


class SlowMomentum(OuterStep):
    """SlowMo (Wang et al., arXiv 1910.00643, algorithm 1).

    `m = b m + (x - mean) / rate`, then `x = x - a rate m`, with the learning rate of the local steps.
    """

    def __init__(self, options: SlowMomentumOptions) -> None:
        super().__init__()
        self._decay, self._rate = options.outer_momentum, options.outer_learning_rate

    def agreed(self, mean: torch.Tensor, done: LocalRound) -> torch.Tensor:
        anchor, momentum = self.states[done.name]
        momentum.mul_(self._decay).add_(done.gradient(anchor - mean))
        return anchor.sub_(momentum, alpha=self._rate * done.learning_rate)


PARTS = (SynchroniserOf(name=NAME, make=SlowMomentum),)
