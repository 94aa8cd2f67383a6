"""`SteppedPieces`: pieces of parameters that an optimizer with Adam's moments steps at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

Tensors = list[torch.Tensor]

# Elements that are stepped at once: they bound the memory of temporary tensors.
ELEMENTS = 2**20


def unless(
    left_out: torch.Tensor | None, number: float, otherwise: float, like: torch.Tensor
) -> float | torch.Tensor:
    """Return a number, or the other one for a step that is left out, in the precision of `like`."""
    if left_out is None:
        return number
    return torch.where(left_out > 0, otherwise, like.new_full((), number))


class SteppedPieces(NamedTuple):
    """Flat pieces of parameters that are stepped at once, with the same options.

    Attributes:
        columns: the column of each piece's parameter in sums.
        options: those of the parameters' group.
        weights, means, squares, gradients: the pieces; `means` and `squares` are the moments.
        steps: the number of steps, this one included, shape ().
    """

    columns: list[int]
    options: Mapping[str, Any]
    weights: Tensors
    means: Tensors
    squares: Tensors
    gradients: Tensors
    steps: torch.Tensor

    def advance(self, left_out: torch.Tensor | None) -> None:
        """Move both moments towards the gradients; those of a step that is left out are 0."""
        first, second = self.options["betas"]
        for beta, moments in ((first, self.means), (second, self.squares)):
            kept = unless(left_out, beta, 1.0, self.weights[0])
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
        rate = unless(left_out, self.options["lr"], 0.0, self.weights[0])
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


def clear_left_out(parameters: Iterable[torch.nn.Parameter], left_out: torch.Tensor | None) -> None:
    """Clear the gradients of a step that is left out: they may not be finite."""
    for parameter in parameters if left_out is not None else ():
        assert parameter.grad is not None, "it is stepped"
        parameter.grad.masked_fill_(left_out > 0, 0.0)


def begin_moments(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[torch.nn.Parameter],
    left_out: torch.Tensor | None,
) -> None:
    """Count the step of parameters with moments, unless it is left out; clear its gradients then."""
    stepped = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in stepped:
        state = optimizer.state[parameter]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = map(torch.zeros_like, (parameter, parameter))
        # A checkpoint gives the count back in host memory.
        step = state.get("step", torch.zeros((), dtype=torch.float32))
        state["step"] = step.to(parameter.device)
    if not stepped:
        return
    steps = [optimizer.state[parameter]["step"] for parameter in stepped]
    torch._foreach_add_(steps, 1.0 if left_out is None else 1.0 - left_out)
    clear_left_out(stepped, left_out)


def in_pieces(
    optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]
) -> Iterator[SteppedPieces]:
    """Yield the pieces of groups, at most `ELEMENTS` elements at once; all step equally often.

    Columns number the parameters of these groups.
    """
    begins = 0
    for group in groups:
        cut = [
            (column, views)
            for column, parameter in enumerate(group["params"], begins)
            if parameter.grad is not None
            for views in zip(*_flat(optimizer, parameter), strict=True)
        ]
        steps = [optimizer.state[group["params"][column - begins]]["step"] for column, _ in cut[:1]]
        begins += len(group["params"])
        borders, elements = [0], 0
        for place, (_, (weights, *_)) in enumerate(cut):
            elements += weights.numel()
            if elements > ELEMENTS and place > borders[-1]:
                borders.append(place)
                elements = weights.numel()
        for start, end in pairwise([*borders, len(cut)]):
            if start < end:
                yield _at_once(group, cut[start:end], steps[0])


def _flat(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter
) -> Iterator[Sequence[torch.Tensor]]:
    """Yield the pieces of weights, moments and gradient of a parameter, of at most `ELEMENTS`."""
    state = optimizer.state[parameter]
    assert parameter.grad is not None, "it is stepped"
    for one in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"], parameter.grad):
        yield one.view(-1).split(ELEMENTS)


def _at_once(
    options: Mapping[str, Any], cut: Sequence[tuple[int, tuple[torch.Tensor, ...]]], steps: torch.Tensor
) -> SteppedPieces:
    columns = [column for column, _ in cut]
    weights, means, squares, gradients = (list(one) for one in zip(*(views for _, views in cut), strict=True))
    # Before the first step that is not left out, any correction will do.
    return SteppedPieces(columns, options, weights, means, squares, gradients, steps.clamp(min=1.0))
