"""The outer step of distributed sign momentum, and the download of its signs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft.methods.local_averaging.runtime.outer_step import (
    LocalRound,
    OuterState,
    OuterStep,
    own_slice,
    scattered_mean,
)
from weft.methods.sign_momentum.options import NAME, SignMomentumOptions
from weft.methods.sign_momentum.runtime.signs import SlicePieces, packed, random_signs, signs_of, unpacked
from weft.sync.base import Group, SynchroniserOf


class SignMomentum(OuterStep):
    """Distributed sign momentum (arXiv 2411.17866).

    `D = mean(x - x_i) / rate`, `u = beta1 m + (1 - beta1) D`, `x = (1 - eta rate decay) x - eta rate sign(u)`
    and `m = beta2 m + (1 - beta2) D`, with the mean learning rate of the round's local steps. The sign of 0
    is 0. Every rank keeps all of the last agreed weights x. So a weight that no replica has moved has the
    gradient 0, and not the rounding of a mean. And after the step, ranks need only each other's signs.
    """

    def __init__(self, options: SignMomentumOptions) -> None:
        super().__init__()
        self._options = options
        self._pieces: dict[str, SlicePieces] = {}

    def begin(self, name: str, weights: torch.Tensor, group: Group, lengths: Mapping[str, int]) -> None:
        own = own_slice(weights, group)
        self.states[name] = OuterState(weights.clone(), torch.zeros_like(own))
        self._pieces[name] = SlicePieces(lengths, len(own), group.place)

    def average(self, weights: torch.Tensor, done: LocalRound, group: Group) -> None:
        anchor = self.states[done.name].anchor
        moved = scattered_mean(weights.neg_().add_(anchor), done, group)
        signs = self._signs(done.gradient(moved), done, group)
        if self._options.download == "signs":
            own = packed(signs)
            everyone = own.new_empty(group.size * len(own))
            group.all_gather(everyone, own)
            self._move(anchor, unpacked(everyone, weights.dtype), done)
        else:
            self._move(own_slice(anchor, group), signs, done)
            group.all_gather(weights, own_slice(anchor, group))
            anchor.copy_(weights)
        weights.copy_(anchor)

    def _signs(self, gradient: torch.Tensor, done: LocalRound, group: Group) -> torch.Tensor:
        """Return the signs of the step for this rank's slice, and update its momentum."""
        options, momentum = self._options, self.states[done.name].momentum
        direction = momentum * options.beta1 + gradient * (1.0 - options.beta1)
        momentum.mul_(options.beta2).add_(gradient.mul_(1.0 - options.beta2))
        if options.sign == "exact":
            return signs_of(direction)
        return random_signs(direction, self._pieces[done.name], group, done.seed, done.number)

    def _move(self, weights: torch.Tensor, signs: torch.Tensor, done: LocalRound) -> None:
        """Move flat weights by their signs; no rounding depends on the place of an element."""
        rate = self._options.outer_learning_rate * done.learning_rate
        weights.mul_(1.0 - rate * self._options.weight_decay).sub_(signs.mul_(rate))


PARTS = (SynchroniserOf(name=NAME, make=SignMomentum),)
