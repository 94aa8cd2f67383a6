"""Rows with DiLoCo: torch's own Nesterov step from the last agreed weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from methods.rows.local_averaging import AVERAGED, GPT, LLAMA, TIED, Averages, OuterMemory
from torch import nn


@dataclass(frozen=True)
class StepsOutside(Averages):
    """With the change of the average as the gradient."""

    outer_momentum: float = 0.9
    outer_learning_rate: float = 0.7
    word: ClassVar[str] = "diloco"

    def outer(self, state: OuterMemory, moved: torch.Tensor, rate: float, key: tuple[int, str]) -> None:
        whole, momentum = nn.Parameter(state.anchor), self.outer_momentum
        whole.grad = moved
        torch_step = torch.optim.SGD(
            [whole], lr=self.outer_learning_rate, momentum=momentum, nesterov=momentum > 0.0
        )
        if key[0]:
            torch_step.state[whole]["momentum_buffer"] = state.momentum
        torch_step.step()
        if momentum:
            state.momentum.copy_(torch_step.state[whole]["momentum_buffer"])
        state.anchor.copy_(whole)


ROWS = (
    AVERAGED(TIED, methods=(StepsOutside(2),)),
    AVERAGED(GPT, "breadth-first", pp=2, loops=2, methods=(StepsOutside(2, 0.5, 1.0),)),
    AVERAGED(LLAMA, optimizer="adamw", methods=(StepsOutside(3),)),
    AVERAGED(GPT, shares=(3, 1), methods=(StepsOutside(2),)),
)
