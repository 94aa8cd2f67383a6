"""Optimizers of another package, as a run file names them: `own_optimizers:SignMomentum`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from weft.run.state.whole_sums import Parts, WholeSumsOptimizer


class SignMomentum(torch.optim.Optimizer):
    """Steps by the sign of a fading sum of gradients, and says that it keeps one tensor."""

    weft_work: ClassVar[dict[str, Any]] = {"states": 1, "elementwise": True}

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].mul_(0.9).add_(parameter.grad)
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                parameter.add_(state["momentum"].sign(), alpha=-group["lr"])


class Shortening(WholeSumsOptimizer):
    """Steps each tensor by its gradients' sum, the less the longer its gradient is."""

    weft_work: ClassVar[dict[str, Any]] = {"states": 1, "whole_sums": [1]}

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def parts(self) -> Parts:
        squares = torch.zeros(1, len(self.tensors), dtype=torch.float64)
        for column, parameter in enumerate(self.tensors):
            if self.left_out is not None:
                parameter.grad.masked_fill_(self.left_out > 0, 0.0)
            squares[0, column] = parameter.grad.double().square().sum()
        (whole,) = yield squares
        rate = 0.0 if self.left_out is not None and self.left_out > 0 else self.param_groups[0]["lr"]
        for parameter, square in zip(self.tensors, whole, strict=True):
            total = self.state[parameter].setdefault("total", torch.zeros_like(parameter))
            total.add_(parameter.grad)
            parameter.sub_(total / (1.0 + square.sqrt()) * rate)


class Silent(torch.optim.SGD):
    """Says nothing of what it keeps."""


class Garbled(torch.optim.SGD):
    """Says what makes no sense."""

    weft_work: ClassVar[dict[str, Any]] = {"states": -1, "stats": 2}


class Eager(torch.optim.Adagrad):
    """Makes its states when it is made."""


def no_optimizer(params: Iterable[Any], lr: float) -> str:
    return "no optimizer"


def unlike(params: Iterable[Any]) -> None:
    """Takes no learning rate."""


def momentum_sgd(params: Iterable[Any], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.5)


momentum_sgd.weft_work = {"states": 1, "elementwise": True}  # type: ignore[attr-defined]
