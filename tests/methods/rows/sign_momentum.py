"""Rows with sign momentum, whose replicas must move from the same weights to the same bits of a sign."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from methods.rows.local_averaging import AVERAGED, LLAMA, TIED_LLAMA, Averages, OuterMemory
from small_jobs import SEED
from small_plans import divisible

from weft.sync.codecs.counter import Key, uniforms


@dataclass(frozen=True)
class SignSteps(Averages):
    """The paper's outer step, of one parameter. Its random signs are drawn as the documents say."""

    outer_learning_rate: float = 1.0
    beta1: float = 0.95
    beta2: float = 0.98
    weight_decay: float = 0.1
    sign: str = "exact"
    download: str = "signs"
    word: ClassVar[str] = "sign-momentum"

    def outer(self, state: OuterMemory, moved: torch.Tensor, rate: float, key: tuple[int, str]) -> None:
        gradient = moved / rate
        direction = self.beta1 * state.momentum + (1.0 - self.beta1) * gradient
        signs = direction.sign()
        if self.sign == "random":
            number, name = key
            drawn = uniforms(Key.of(SEED, "sign", number, name), 0, direction.numel(), "cpu")
            drawn = drawn.view(direction.shape)
            signs *= torch.where(drawn < 0.5 + direction.abs() / (2.0 * direction.abs().max()), 1.0, -1.0)
        step = self.outer_learning_rate * rate
        state.anchor.copy_((1.0 - step * self.weight_decay) * state.anchor - step * signs)
        state.momentum.copy_(self.beta2 * state.momentum + (1.0 - self.beta2) * gradient)


SHORT = {"outer_learning_rate": 0.1, "beta1": 0.5, "beta2": 0.9}
ROWS = (
    AVERAGED(LLAMA, optimizer="falling", methods=(SignSteps(2, **SHORT),)),
    AVERAGED(TIED_LLAMA, "1f1b", pp=2, optimizer="adamw", methods=(SignSteps(2, **SHORT),)),
    AVERAGED(LLAMA, "breadth-first", pp=2, loops=2, methods=(SignSteps(3, **SHORT, download="weights"),)),
    AVERAGED(replace(divisible("llama"), layers=2), tp=2, methods=(SignSteps(2, **SHORT),)),
    AVERAGED(LLAMA, shares=(3, 1), methods=(SignSteps(2, **SHORT),)),
    AVERAGED(TIED_LLAMA, "1f1b", pp=2, methods=(SignSteps(3, **SHORT, sign="random"),)),
)
