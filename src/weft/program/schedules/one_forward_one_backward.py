"""1F1B: a short warm-up, then one forward and one backward in turn (PipeDream-Flush, arXiv 2006.09503).

The order is Megatron-LM's: device r warms up with min(M, P - 1 - r) forwards. It never holds more than
min(M, P - r) micro-batches; M < P is legal.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from weft.program.schedules.base import ComputeOrder, Options, Pipeline
from weft.program.schedules.ring import OneStagePerDevice, take_turns


class OneForwardOneBackward(OneStagePerDevice):
    """One stage per device; the bubble of GPipe with the activations of at most P micro-batches."""

    name: ClassVar[str] = "1f1b"
    synonyms: ClassVar[tuple[str, ...]] = ("Schedule1F1B", "one-forward-one-backward", "pipedream-flush")

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        warm_up = min(pipeline.micro_batches, pipeline.devices - 1 - device)
        kind, micro_batch = take_turns(pipeline.micro_batches, warm_up)
        return ComputeOrder(kind, np.full_like(kind, device), micro_batch)
