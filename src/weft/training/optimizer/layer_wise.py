"""`Lamb`, `NvLamb` and `Lans`: optimizers for large batches, which scale each tensor's update by norms.

Norms are those of whole tensors, however ranks shard them (`weft.run.state.whole_sums`). Moments have the
precision of the stepped parameters. A step overwrites gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from weft.describe.optimizers import LAMB, LANS, NVLAMB, OptimizerWork
from weft.run.state.whole_sums import Parts, WholeSumsOptimizer
from weft.training.optimizer.pieces import SteppedPieces, Tensors, begin_moments, in_pieces


class Norms:
    """The norms of several kinds of pieces, by the columns of their parameters."""

    def __init__(self, kinds: int, columns: int) -> None:
        self._found: list[list[Tensors]] = [[[] for _ in range(columns)] for _ in range(kinds)]

    def add(self, columns: Sequence[int], *kinds: Tensors) -> None:
        for found, pieces in zip(self._found, kinds, strict=True):
            norms = torch._foreach_norm(pieces, 2, dtype=torch.float64)
            for column, norm in zip(columns, norms, strict=True):
                found[column].append(norm)

    def squares(self, device: torch.device | None) -> torch.Tensor:
        """Return the sums of squares, shape (kinds, columns)."""
        none = torch.zeros((), dtype=torch.float64, device=device)
        norms = [
            torch.stack(pieces).norm() if len(pieces) > 1 else (*pieces, none)[0]
            for found in self._found
            for pieces in found
        ]
        flat = torch.stack(norms) if norms else none.new_zeros(0)
        return flat.square().view(len(self._found), -1)


def ratio(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """Return the ratio of norms, given their squares; 1 where it is 0 or not finite."""
    found = (above / below).sqrt()
    return torch.where(found.isfinite() & (found > 0), found, 1.0)


class LayerWise(WholeSumsOptimizer):
    """The common part: Adam's moments, and pieces of parameters that are stepped at once.

    Args:
        params: parameters or groups of them. Updates of a group with `adapts` False keep their length.
        lr: the learning rate.
        betas: the decay of both moments.
        eps: the least deviation.
        weight_decay: the part of the weights in the update.
    """

    weft_work: ClassVar[OptimizerWork]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapts": True}
        super().__init__(params, options)

    def _begin(self) -> None:
        begin_moments(self, self.tensors, self.left_out)

    def _norms(self, kinds: int) -> Norms:
        return Norms(kinds, len(self.tensors))

    def _device(self) -> torch.device | None:
        return next((parameter.device for parameter in self.tensors), None)

    def _pieces(self) -> Iterator[SteppedPieces]:
        return in_pieces(self, self.param_groups)


class Lamb(LayerWise):
    """LAMB: Adam's update of each tensor, made as long as its weights (You et al., arXiv 1904.00962).

    With the corrected moments m and v, u = m / (sqrt(v) + eps) + weight_decay w; w -= lr u |w| / |u|. The
    ratio of the norms is 1 where it is 0 or not finite.
    """

    weft_work = LAMB

    @torch.no_grad()
    def parts(self) -> Parts:
        self._begin()
        norms = self._norms(2)
        for pieces in self._pieces():
            pieces.advance(self.left_out)
            # The update takes the place of the gradient, which nobody needs any more.
            torch._foreach_copy_(pieces.gradients, pieces.by_means(pieces.deviations()))
            norms.add(pieces.columns, pieces.weights, pieces.gradients)
        weights, updates = yield norms.squares(self._device())
        ratios = ratio(weights, updates)
        for pieces in self._pieces():
            pieces.move(pieces.gradients, ratios if pieces.options["adapts"] else None, self.left_out)


class NvLamb(Lamb):
    """NVLAMB: LAMB with a gradient of norm 1, to which `gradient-norm` scales the whole gradient.

    Source: Pretraining BERT with Layer-wise Adaptive Learning Rates, NVIDIA technical blog, 2019.
    """

    weft_work = NVLAMB


class Lans(LayerWise):
    """LANS: Nesterov's momentum, with norms of gradients and updates (Zheng et al., arXiv 2006.13484).

    With g = gradient / |gradient|, its corrected moments m and v, the weight decay d and the first beta b,

        r = m / (sqrt(v) + eps) + d w        c = g / (sqrt(v) + eps) + d w
        w -= lr |w| (b r / |r| + (1 - b) c / |c|)

    Ratios of norms are 1 where they are 0 or not finite.
    """

    weft_work = LANS

    @torch.no_grad()
    def parts(self) -> Parts:
        self._begin()
        norms = self._norms(1)
        for pieces in self._pieces():
            norms.add(pieces.columns, pieces.gradients)
        (gradients,) = yield norms.squares(self._device())
        ones = torch.ones_like(gradients)
        norms = self._norms(3)
        for pieces in self._pieces():
            pieces.scale(pieces.gradients, ratio(ones, gradients))
            pieces.advance(self.left_out)
            deviations = pieces.deviations()
            both = pieces.by_means(deviations), pieces.by_gradients(deviations)
            norms.add(pieces.columns, pieces.weights, *both)
        weights, means, gradients = yield norms.squares(self._device())
        for pieces in self._pieces():
            beta, deviations = pieces.options["betas"][0], pieces.deviations()
            by_means, by_gradients = pieces.by_means(deviations), pieces.by_gradients(deviations)
            pieces.move(by_means, beta * ratio(weights, means), self.left_out)
            pieces.move(by_gradients, (1.0 - beta) * ratio(weights, gradients), self.left_out)
