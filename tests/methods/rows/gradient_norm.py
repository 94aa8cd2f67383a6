"""Rows that clip by the norm of the whole gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import convolutional_jobs
import torch
from asked_methods import CLIPS
from equality_table import Row
from one_process import Copy, Method, Told
from small_plans import tiny


@dataclass(frozen=True)
class Clips(Method):
    """Clipping, of no norm where it is None; one process does it by torch's own."""

    norm: float | None = 0.4
    choices = CLIPS

    @property
    def runtime_options(self) -> Mapping[str, Any]:
        return {"clip_norm": self.norm}

    def before_step(self, copy: Copy, step: int, told: Told) -> None:
        limit = math.inf if self.norm is None else self.norm
        norm = torch.nn.utils.clip_grad_norm_(copy.masters.parameters(), limit).item()
        assert step or self.norm is None or norm > self.norm, "nothing is clipped"
        # Of replicas that step by themselves, the mean.
        told["gradient_norm"] = [told.get("gradient_norm", [0.0])[0] + copy.share * norm]


CLIPPED = partial(Row, methods=(Clips(),), steps=3)
ROWS = (
    CLIPPED(tiny()),
    CLIPPED(tiny(tied=True), dp=3),
    CLIPPED(tiny(tied=True), "1f1b", pp=2, dp=2),
    CLIPPED(tiny(tied=True), "1f1b", pp=2, dp=2, sharding="zero-1"),
    CLIPPED(tiny(tied=True), "breadth-first", pp=2, loops=2),
    CLIPPED(tiny(), "breadth-first", pp=2, dp=2, loops=3, sharding="zero-2"),
    CLIPPED(tiny(tied=True), "depth-first", pp=2, dp=2, loops=2, sharding="zero-2"),
    CLIPPED(tiny(), "zb-v", pp=2, dp=2, loops=2, sharding="zero-1"),
    CLIPPED(tiny(tied=True), "chimera", pp=2, sharding="zero-1"),
    # A momentum, and running statistics, of steps that the device may leave out.
    CLIPPED(tiny(), "1f1b", pp=2, dp=2, sharding="zero-1", optimizer="sgd"),
    CLIPPED(convolutional_jobs.tiny("resnet"), "1f1b", pp=2, dp=2, optimizer="sgd"),
)
