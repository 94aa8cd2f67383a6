"""Rows with slow momentum."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from methods.rows.local_averaging import AVERAGED, GPT, TIED, Averages, OuterMemory, OwnSteps
from small_plans import divisible


@dataclass(frozen=True)
class SlowSteps(Averages):
    """Algorithm 1 of the paper, of one parameter."""

    outer_momentum: float = 0.5
    outer_learning_rate: float = 1.0
    word: ClassVar[str] = "slow-momentum"

    def outer(self, state: OuterMemory, moved: torch.Tensor, rate: float, key: tuple[int, str]) -> None:
        state.momentum.copy_(self.outer_momentum * state.momentum + moved / rate)
        state.anchor.copy_(state.anchor - self.outer_learning_rate * rate * state.momentum)


class OwnSlowSteps(OwnSteps, SlowSteps):
    """Of replicas that take their own numbers of steps; the round's rate is that of its last step."""


ROWS = (
    AVERAGED(GPT, optimizer="falling", methods=(SlowSteps(2),)),
    # Gradients of a key's bias are rounding errors, which AdamW makes as large as its epsilon lets it.
    AVERAGED(TIED, "1f1b", pp=2, optimizer="adamw", methods=(SlowSteps(3, 0.8, 0.5),), tolerance=1e-8),
    AVERAGED(GPT, methods=(OwnSlowSteps(3, replica_steps="3 2"),)),
    AVERAGED(replace(divisible("llama"), layers=2), tp=2, methods=(SlowSteps(2),)),
)
