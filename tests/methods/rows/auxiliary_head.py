"""Rows with an auxiliary head: one process adds its weighted loss to the model's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from asked_methods import with_head
from equality_jobs import LOSSES
from equality_table import Row
from methods.rows.gradient_norm import Clips
from methods.rows.local_averaging import DenseAveraging
from methods.rows.micro_batch_norms import TellsNorms
from one_process import Copy, Method, Told, Values, count
from small_plans import tiny

from weft.describe.plan import Choice
from weft.run.runtime import RankRuntime


@dataclass(frozen=True)
class Head(Method):
    """A head behind a block; of the plan's choice beside the block `weight` alone counts."""

    after: int
    weight: float = 0.3

    @property
    def choices(self) -> tuple[Choice, ...]:
        return (with_head(self.after, self.weight),)

    def added_loss(self, copy: Copy, values: Values, targets: torch.Tensor, told: Told) -> torch.Tensor:
        loss = LOSSES[copy.training.loss](copy.model.auxiliary_head(values[self.after]), targets)
        before = told.get("auxiliary_loss", [0.0])[0]
        told["auxiliary_loss"] = [before + loss.item() / count(copy.training.parts)]
        return self.weight * loss

    def check(self, runtime: RankRuntime) -> None:
        held = any(hasattr(module, "auxiliary_head") for module in runtime.stages.values())
        assert held == any(self.after in runtime.plan.stages[stage].layers for stage in runtime.stages)
        assert not any(key[0] == "auxiliary_loss" for key in runtime._training._workspace.values)


GPT, HEADED = tiny(layers=4), partial(Row, pp=2)
# Two stages have blocks 1 and 2, 3 and 4; four have none, 1 and 2, 3, 4.
ROWS = (
    HEADED(GPT, "1f1b", recompute="full", methods=(Head(1), Clips(0.3))),
    HEADED(tiny(layers=4, tied=True), "zb-h1", recompute="full", methods=(Head(4),)),
    HEADED(GPT, "zb-v", loops=2, recompute="selective", methods=(Head(2), TellsNorms())),
    HEADED(GPT, "breadth-first", loops=2, recompute="selective", methods=(Head(3),)),
    Row(GPT, "breadth-first", dp=2, loops=2, sharding="zero-3", methods=(Head(2),)),
    HEADED(tiny("llama", layers=4), "chimera", methods=(Head(3),)),
    # A stage that splits micro-batches has a loss of each part.
    HEADED(GPT, "1f1b", splits=(2, 1), methods=(Head(1),)),
    # Replicas that step by themselves weigh their own head.
    Row(GPT, "1f1b", dp=2, methods=(Head(1), DenseAveraging(1))),
)
