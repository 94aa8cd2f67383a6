"""Rows whose replicas step by themselves: one process steps a model for each in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from equality_table import Row
from methods.rows.gradient_norm import Clips
from one_process import Copy, Method, Told
from small_plans import divisible, tiny

from weft.describe.plan import Choice
from weft.methods.local_averaging.options import LEFT_OUT
from weft.run.runtime import RankRuntime


class OuterMemory(NamedTuple):
    """Of a parameter, its last agreed values and the momentum of outer steps."""

    anchor: torch.Tensor
    momentum: torch.Tensor


@dataclass(frozen=True)
class Averages(Method):
    """Averages count as many micro-batches as a replica runs; an outer step goes on from the last ones.

    Every field is an option of the method.
    """

    every: int
    word: ClassVar[str] = "local-averaging"
    by_replica = True

    @property
    def sync(self) -> Choice:
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        return Choice(name=self.word, options=options)

    def outer(self, state: OuterMemory, moved: torch.Tensor, rate: float, key: tuple[int, str]) -> None:
        """Step from the anchor, which the copies have moved from so far on average, in place.

        `rate` is the mean learning rate of the round; `key` has its number and the parameter's name.
        """
        state.anchor.sub_(moved)

    def before_step(self, copy: Copy, step: int, told: Told) -> None:
        if (step + 1) % self.every == 0:
            told[LEFT_OUT] = [0.0]

    @torch.no_grad()
    def begin(self, copies: Sequence[Copy]) -> dict[str, OuterMemory]:
        return {
            name: OuterMemory(one.detach().clone(), torch.zeros_like(one))
            for name, one in copies[0].masters.named_parameters()
        }

    @torch.no_grad()
    def after_step(self, copies: Sequence[Copy], step: int, states: dict[str, OuterMemory]) -> None:
        if (step + 1) % self.every:
            return
        rate, weights = self.rate(copies), self.weights(copies)
        same = zip(*(copy.masters.parameters() for copy in copies), strict=True)
        for (name, state), parameters in zip(states.items(), same, strict=True):
            pairs = zip(weights, parameters, strict=True)
            moved = sum(weight * (state.anchor - one) for weight, one in pairs)
            self.outer(state, moved, rate, (step // self.every, name))
            for one in parameters:
                one.copy_(state.anchor)

    def weights(self, copies: Sequence[Copy]) -> list[float]:
        """Those of the copies in the average."""
        return [copy.share for copy in copies]

    def rate(self, copies: Sequence[Copy]) -> float:
        """The learning rate of a round."""
        return sum(copies[0].learning_rates[-self.every :]) / self.every

    def check(self, runtime: RankRuntime) -> None:
        assert runtime.program.steps_per_cycle == self.every


@dataclass(frozen=True)
class OwnSteps(Averages):
    """A replica takes as many steps of a cycle as its number says; its samples of them count."""

    replica_steps: str = ""

    @property
    def taken(self) -> list[set[int]]:
        """The steps of a cycle that each replica takes: its n-th ends no earlier than its share of them."""
        numbers = [int(word) for word in self.replica_steps.split()]
        return [{-(-turn * self.every // steps) - 1 for turn in range(1, steps + 1)} for steps in numbers]

    def rests(self, place: int, step: int) -> bool:
        return step % self.every not in self.taken[place]

    def weights(self, copies: Sequence[Copy]) -> list[float]:
        samples = [copy.share * len(taken) for copy, taken in zip(copies, self.taken, strict=True)]
        return [one / sum(samples) for one in samples]

    def rate(self, copies: Sequence[Copy]) -> float:
        return copies[0].learning_rates[-1]

    def see_all(self, copies: Sequence[Copy], step: int, told: Told) -> None:
        ran = sum(copy.share for place, copy in enumerate(copies) if not self.rests(place, step))
        for name in {"loss", "gradient_norm"} & told.keys():
            told[name] = [told[name][0] / ran]


class DenseAveraging(Averages):
    """Of plain descent, averaged after every step: dense training."""

    by_replica = False

    def after_step(self, copies: Sequence[Copy], step: int, states: dict[str, OuterMemory]) -> None:
        pass


# Biases of keys have no gradient but rounding, which Adam and signs make large. Llama has no such biases.
LLAMA, TIED_LLAMA = tiny("llama", layers=2), tiny("llama", layers=2, tied=True)
GPT, TIED, AVERAGED = tiny(layers=2), tiny(layers=2, tied=True), partial(Row, dp=2, steps=6)
ROWS = (
    AVERAGED(GPT, methods=(Averages(1),)),
    AVERAGED(TIED, "1f1b", pp=2, methods=(Averages(3),)),
    AVERAGED(GPT, methods=(DenseAveraging(1),)),
    AVERAGED(GPT, shares=(3, 1), methods=(Averages(2),)),
    AVERAGED(GPT, shares=(3, 1), methods=(Averages(2), Clips(0.2))),
    AVERAGED(TIED, "1f1b", pp=2, methods=(Averages(2), Clips(0.2))),
    AVERAGED(replace(divisible("llama"), layers=2), tp=2, methods=(Averages(2), Clips(0.2))),
    AVERAGED(GPT, methods=(OwnSteps(3, "3 1"),)),
    AVERAGED(GPT, shares=(3, 1), methods=(OwnSteps(3, "2 3"),)),
    AVERAGED(LLAMA, optimizer="adamw", methods=(OwnSteps(3, "2 3"),)),
    AVERAGED(TIED, "1f1b", pp=2, methods=(OwnSteps(3, "3 2"), Clips(0.2))),
)
