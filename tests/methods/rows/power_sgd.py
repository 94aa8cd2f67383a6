"""Rows whose replicas send low-rank factors: one process keeps all errors and factors the same sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import convolutional_jobs
import torch
from equality_table import Row
from methods.rows.gradient_norm import Clips
from one_process import Copy, Method
from small_jobs import SEED
from small_plans import divisible, tiny

from weft.describe.plan import Choice
from weft.methods.power_sgd.options import PowerSgdOptions
from weft.methods.power_sgd.runtime import FactoredMatrix, first_right, orthonormal
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stage
from weft.run.state.synchroniser_state import SYNCHRONISER


@dataclass(frozen=True)
class Factors(Method):
    """`layers` of each stage; `memory` has Q and the replicas' errors by parameter."""

    layers: tuple[int, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    memory: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    by_share = True

    @property
    def sync(self) -> Choice:
        return Choice(name="power-sgd", options=dict(self.options))

    def reduce(
        self, copy: Copy, step: int, addends: Sequence[Sequence[torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        table = PowerSgdOptions.model_validate(dict(self.options))
        if not step:
            self.memory.clear()
        places, found = self.places(copy), []
        for (name, parameter), *gradients in zip(copy.masters.named_parameters(), *addends, strict=True):
            shape = parameter.shape
            rank = table.rank_of(shape[0], parameter.numel() // shape[0]) if len(shape) > 1 else 0
            if rank and step >= table.start_step:
                flat = [one.reshape(shape[0], -1) for one in gradients]
                found.append(self.factored(name, places[name], rank, flat).view(shape))
            else:
                found.append(sum(gradients))
        return found

    def factored(
        self, name: str, place: tuple[int, int], rank: int, gradients: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        rows, columns = gradients[0].shape
        stage, number = place
        if name not in self.memory:
            first = first_right(stage, FactoredMatrix(number, 0, rows, columns, rank))
            self.memory[name] = first.to(gradients[0]), [torch.zeros_like(one) for one in gradients]
        right, errors = self.memory[name]
        wholes = [one + error for one, error in zip(gradients, errors, strict=True)]
        basis = orthonormal(right.T)
        left = orthonormal(sum(whole @ basis for whole in wholes))
        own = [left.T @ whole for whole in wholes]
        self.memory[name] = (
            sum(own),
            [torch.addmm(whole, left, one, alpha=-1.0) for whole, one in zip(wholes, own, strict=True)],
        )
        return left @ sum(own)

    def places(self, copy: Copy) -> dict[str, tuple[int, int]]:
        """Of each parameter the stage, and its number there."""
        config = copy.training.model
        borders = list(accumulate(self.layers or (config.layers + 2,), initial=0))
        stages = (build_stage(config, range(*pair), SEED, torch.float32) for pair in pairwise(borders))
        return {
            name: (stage, number)
            for stage, module in enumerate(stages)
            for number, (name, _) in enumerate(module.named_parameters())
        }

    def publish(self, copy: Copy, step: int) -> None:
        for parameter, master in zip(copy.model.parameters(), copy.masters.parameters(), strict=True):
            parameter.copy_(master)

    def check(self, runtime: RankRuntime) -> None:
        kept = runtime.methods[SYNCHRONISER].rank_tensors()
        assert all(kept[f"error/{stage}"].any() for stage in runtime.stages)


@dataclass(frozen=True)
class FullRank(Method):
    """Factors that hold all of a matrix: dense training."""

    sync = Choice(name="power-sgd", options={"rank": 1000, "minimum_compression": 1e-6})

    def check(self, runtime: RankRuntime) -> None:
        kept = runtime.methods[SYNCHRONISER].rank_tensors()
        assert any(name.startswith("right/") for name in kept)


GPT, WIDE = tiny(layers=2), divisible("gpt")
# Two factors are less than half of most matrices.
ONE = (("rank", 1), ("minimum_compression", 1.5))
SENT = partial(
    Row, GPT, micro_batches=2, precision="fp32", optimizer="adamw", steps=4, methods=(Factors(options=ONE),)
)
BITS = partial(SENT, same_bits=True)
ROWS = (
    BITS(dp=2),
    BITS(dp=3),
    BITS(dp=2, methods=(Factors(options=(("rank", 2), ("minimum_compression", 0.5), ("start_step", 2))),)),
    BITS(dp=2, precision="bf16"),
    BITS(dp=2, pp=2, schedule="1f1b", methods=(Factors(layers=(2, 2), options=ONE),)),
    BITS(dp=2, sharding="zero-1"),
    # Losses and norms are added up in other orders than in one process.
    SENT(dp=3, shares=(3, 1, 2), precision="fp64", methods=(Factors(options=ONE), Clips(0.05))),
    Row(tiny(layers=2, tied=True), "1f1b", pp=2, dp=2, methods=(FullRank(), Clips(0.2))),
    Row(GPT, "chimera", pp=2, methods=(FullRank(),)),
    # The ranks of a replica factor parts of matrices, or whole ones alike.
    Row(WIDE, dp=2, tp=2, methods=(FullRank(),)),
    Row(WIDE, dp=2, cp=2, sharding="zero-1", methods=(FullRank(),)),
    Row(convolutional_jobs.tiny("resnet"), dp=2, methods=(FullRank(),)),
)
