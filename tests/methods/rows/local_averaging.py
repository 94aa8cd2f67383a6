"""Rows whose replicas step by themselves: one process steps a model for each in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from equality_table import Row
from one_process import Copy, Method
from small_plans import tiny
from torch import nn

from weft.describe.plan import Choice
from weft.run.runtime import RankRuntime


@dataclass(frozen=True)
class Averages(Method):
    """Averages count as many micro-batches as a replica runs; Nesterov's step from them is torch's own."""

    every: int
    outer_momentum: float = 0.0
    by_replica = True

    @property
    def sync(self) -> Choice:
        options = {"every": self.every, "outer_momentum": self.outer_momentum}
        return Choice(name="local-averaging", options=options)

    @torch.no_grad()
    def begin(self, copies: Sequence[Copy]) -> torch.optim.Optimizer:
        whole = [nn.Parameter(one.detach().clone()) for one in copies[0].masters.parameters()]
        momentum = self.outer_momentum
        return torch.optim.SGD(whole, lr=1.0, momentum=momentum, nesterov=momentum > 0.0)

    @torch.no_grad()
    def after_step(self, copies: Sequence[Copy], step: int, outer: torch.optim.Optimizer) -> None:
        if (step + 1) % self.every:
            return
        [group] = outer.param_groups
        same = list(zip(*(copy.masters.parameters() for copy in copies), strict=True))
        for whole, parameters in zip(group["params"], same, strict=True):
            # What the average has moved is the gradient.
            mean = sum(copy.share * one for copy, one in zip(copies, parameters, strict=True))
            whole.grad = whole - mean
        outer.step()
        for whole, parameters in zip(group["params"], same, strict=True):
            for one in parameters:
                one.copy_(whole)

    def check(self, runtime: RankRuntime) -> None:
        assert runtime.program.steps_per_cycle == self.every


class DenseAveraging(Averages):
    """Of plain descent, averaged after every step: dense training."""

    by_replica = False

    def after_step(self, copies: Sequence[Copy], step: int, outer: torch.optim.Optimizer) -> None:
        pass


GPT, TIED, AVERAGED = tiny(layers=2), tiny(layers=2, tied=True), partial(Row, dp=2, steps=6)
ROWS = (
    AVERAGED(GPT, methods=(Averages(1),)),
    AVERAGED(TIED, methods=(Averages(2, 0.9),)),
    AVERAGED(TIED, "1f1b", pp=2, methods=(Averages(3),)),
    AVERAGED(GPT, "breadth-first", pp=2, loops=2, methods=(Averages(2, 0.9),)),
    AVERAGED(GPT, methods=(DenseAveraging(1),)),
    AVERAGED(GPT, shares=(3, 1), methods=(Averages(2),)),
)
