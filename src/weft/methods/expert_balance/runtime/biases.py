"""`RouterBiases`: biases for the choice of experts, which follow the loads of steps.

A router adds its bias to scores to choose experts, and not to weigh them. After a step, experts with fewer
tokens than the mean get a larger bias, the others a smaller one (Wang et al., arXiv 2408.15664).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.methods.expert_balance.report import LOADS
from weft.program.program import NONE
from weft.run.streams import Value
from weft.run.workspace import Workspace


class RouterBiases:
    """The gate of a stage's steps, which keeps its biases until all passes of the step are over.

    Args:
        biases: those of the stage, (experts,), by the place of their mixture in the model.
        rate: the change of a bias in a step.
    """

    def __init__(self, workspace: Workspace, biases: Mapping[int, torch.Tensor], rate: float) -> None:
        self._workspace, self._biases, self._rate = workspace, biases, rate
        # The tokens of all experts of the model in the step, (mixtures x experts,).
        self._loads: torch.Tensor | None = None

    def reads(self) -> tuple[Value[Any], ...]:
        return (self._workspace.values[LOADS, NONE, NONE],)

    def votes(self, *values: Value[Any]) -> None:
        (loads,) = values
        self._loads = loads.content

    def stepped(self) -> None:
        assert self._loads is not None, "gates vote before the step"
        for place, bias in self._biases.items():
            own = self._loads.view(-1, len(bias))[place]
            bias += self._rate * (own.mean() - own).sign().to(bias)
