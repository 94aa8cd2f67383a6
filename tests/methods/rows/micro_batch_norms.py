"""Rows that tell the norms of micro-batches: one process finds them of each alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from asked_methods import TELLS_NORMS
from equality_table import Row
from one_process import Copy, Method, Told, count
from small_plans import divisible


@dataclass(frozen=True)
class TellsNorms(Method):
    """The norm of the gradient of every micro-batch."""

    choices = TELLS_NORMS

    def see(self, copy: Copy, gradients: Sequence[torch.Tensor], told: Told) -> None:
        norm = torch.cat([one.flatten() for one in gradients]).norm().item()
        told.setdefault("micro_batch_norms", []).append(count(copy.training.parts) * norm)


GPT, TIED = (replace(divisible("gpt", tied=tied), layers=4) for tied in (False, True))
TOLD = partial(Row, methods=(TellsNorms(),), loss="tokens")
ROWS = (
    TOLD(TIED, "1f1b"),
    TOLD(GPT, "1f1b", pp=2, dp=2, sharding="zero-3"),
    TOLD(GPT, "gpipe", pp=2, recompute="full"),
    TOLD(GPT, "breadth-first", pp=2, dp=2, loops=2, recompute="selective", sharding="zero-1"),
    TOLD(GPT, "zb-h1", pp=2, recompute="full"),
    TOLD(GPT, "chimera", pp=2),
    TOLD(GPT, "1f1b", pp=2, copies=(1, 2)),
    TOLD(GPT, "zb-h1", pp=2, tp=2),
    TOLD(GPT, "zb-h1", pp=2, cp=2, recompute="selective"),
    TOLD(TIED, "1f1b", cp=2, tp=2),
)
