"""`Lamb`, `NvLamb` and `Lans`: optimizers for large batches, which scale each tensor's update by norms.

Norms are those of whole tensors, however ranks shard them (`weft.run.state.whole_sums`). Moments have the
precision of the stepped parameters. A step overwrites gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch

from weft.describe.optimizers import LAMB, LANS, NVLAMB, OptimizerWork
from weft.run.state.whole_sums import Parts, WholeSumsOptimizer

Tensors = list[torch.Tensor]

# Elements that are stepped at once: they bound the memory of temporary tensors.
ELEMENTS = 2**20


class SteppedPieces(NamedTuple):
    """Flat pieces of parameters that are stepped at once, with the same options.

    Attributes:
        columns: the column of each piece's parameter in sums.
        options: those of the parameters' group.
        weights, means, squares, gradients: the pieces; `means` and `squares` are the moments.
        steps: the number of steps, this one included, shape ().
    """

    columns: list[int]
    options: dict[str, Any]
    weights: Tensors
    means: Tensors
    squares: Tensors
    gradients: Tensors
    steps: torch.Tensor

    def advance(self, left_out: torch.Tensor | None) -> None:
        """Move both moments towards the gradients; those of a step that is left out are 0."""
        first, second = self.options["betas"]
        for beta, moments in ((first, self.means), (second, self.squares)):
            kept = self._unless(left_out, beta, 1.0)
            torch._foreach_mul_(moments, kept)
        torch._foreach_add_(self.means, self.gradients, alpha=1.0 - first)
        torch._foreach_addcmul_(self.squares, self.gradients, self.gradients, value=1.0 - second)

    def deviations(self) -> Tensors:
        """Return the square roots of the corrected second moments, plus epsilon."""
        roots = list(torch._foreach_sqrt(self.squares))
        torch._foreach_div_(roots, self._correction(1).sqrt())
        torch._foreach_add_(roots, self.options["eps"])
        return roots

    def by_means(self, deviations: Tensors) -> Tensors:
        """Return Adam's update: corrected means by deviations, plus the decay of the weights."""
        updates = list(torch._foreach_div(self.means, deviations))
        torch._foreach_div_(updates, self._correction(0))
        return self._decayed(updates)

    def by_gradients(self, deviations: Tensors) -> Tensors:
        """Return the same update of the gradients in place of the means."""
        return self._decayed(list(torch._foreach_div(self.gradients, deviations)))

    def move(self, updates: Tensors, ratios: torch.Tensor | None, left_out: torch.Tensor | None) -> None:
        """Move the weights against updates of the ratios' lengths, shape (parameters,); None: 1."""
        rate = self._unless(left_out, self.options["lr"], 0.0)
        if ratios is None:
            torch._foreach_mul_(updates, rate)
        else:
            self.scale(updates, rate * ratios)
        torch._foreach_sub_(self.weights, updates)

    def scale(self, pieces: Tensors, factors: torch.Tensor) -> None:
        """Multiply pieces by the factors of their parameters, shape (parameters,)."""
        by_column = factors.to(self.weights[0].dtype).unbind()
        torch._foreach_mul_(pieces, [by_column[column] for column in self.columns])

    def _decayed(self, updates: Tensors) -> Tensors:
        torch._foreach_add_(updates, self.weights, alpha=self.options["weight_decay"])
        return updates

    def _correction(self, moment: int) -> torch.Tensor:
        found: torch.Tensor = 1.0 - self.options["betas"][moment] ** self.steps.double()
        return found.to(self.weights[0].dtype)

    def _unless(self, left_out: torch.Tensor | None, number: float, otherwise: float) -> float | torch.Tensor:
        """Return a number, or the other one for a step that is left out."""
        if left_out is None:
            return number
        return torch.where(left_out > 0, otherwise, self.weights[0].new_full((), number))


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
        """Count the step, unless it is left out; clear its gradients then."""
        left_out = self.left_out
        parameters = [parameter for parameter in self.tensors if parameter.grad is not None]
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["exp_avg"], state["exp_avg_sq"] = map(torch.zeros_like, (parameter, parameter))
            # A checkpoint gives the count back in host memory.
            step = state.get("step", torch.zeros((), dtype=torch.float32))
            state["step"] = step.to(parameter.device)
        if not parameters:
            return
        steps = [self.state[parameter]["step"] for parameter in parameters]
        torch._foreach_add_(steps, 1.0 if left_out is None else 1.0 - left_out)
        if left_out is not None:
            for parameter in parameters:
                assert parameter.grad is not None, "it is stepped"
                parameter.grad.masked_fill_(left_out > 0, 0.0)

    def _norms(self, kinds: int) -> Norms:
        return Norms(kinds, len(self.tensors))

    def _device(self) -> torch.device | None:
        return next((parameter.device for parameter in self.tensors), None)

    def _pieces(self) -> Iterator[SteppedPieces]:
        """Yield all pieces, at most `ELEMENTS` elements at once; all parameters step equally often."""
        begins = 0
        for group in self.param_groups:
            cut = [
                (column, views)
                for column, parameter in enumerate(group["params"], begins)
                if parameter.grad is not None
                for views in zip(*self._flat(parameter), strict=True)
            ]
            begins += len(group["params"])
            borders, elements = [0], 0
            for place, (_, (weights, *_)) in enumerate(cut):
                elements += weights.numel()
                if elements > ELEMENTS and place > borders[-1]:
                    borders.append(place)
                    elements = weights.numel()
            for start, end in pairwise([*borders, len(cut)]):
                if start < end:
                    yield self._at_once(group, cut[start:end])

    def _flat(self, parameter: torch.nn.Parameter) -> Iterator[Sequence[torch.Tensor]]:
        """Yield the pieces of weights, moments and gradient of a parameter, of at most `ELEMENTS`."""
        state = self.state[parameter]
        assert parameter.grad is not None, "it is stepped"
        for one in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"], parameter.grad):
            yield one.view(-1).split(ELEMENTS)

    def _at_once(
        self, options: dict[str, Any], cut: Sequence[tuple[int, tuple[torch.Tensor, ...]]]
    ) -> SteppedPieces:
        columns = [column for column, _ in cut]
        weights, means, squares, gradients = (
            list(one) for one in zip(*(views for _, views in cut), strict=True)
        )
        # Before the first step that is not left out, any correction will do.
        steps = self.state[self.tensors[columns[0]]]["step"].clamp(min=1.0)
        return SteppedPieces(columns, options, weights, means, squares, gradients, steps)


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
