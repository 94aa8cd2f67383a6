"""ZB-H1 (ZB1P): 1F1B with split backwards; weight parts fill the bubble (Qi et al., arXiv 2401.10241).

The order is that of torch's `ScheduleInterleavedZeroBubble` with one stage per rank. Device r warms up with
min(M, P - 1 - r) forwards, then alternates forwards with input parts. It runs each weight part r input parts
after its own input part. So it never keeps more than P micro-batches' activations.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from weft.program.schedules.base import ComputeOrder, Options, Pipeline
from weft.program.schedules.ring import OneStagePerDevice, take_split_turns


class ZeroBubbleH1(OneStagePerDevice):
    """One stage per device; a third of 1F1B's bubble when all three parts take equal times."""

    name: ClassVar[str] = "zb-h1"
    synonyms: ClassVar[tuple[str, ...]] = ("ScheduleInterleavedZeroBubble", "ZB1P", "zero-bubble")

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        warm_up = min(pipeline.micro_batches, pipeline.devices - 1 - device)
        kind, micro_batch = take_split_turns(pipeline.micro_batches, warm_up, weight_lag=device)
        return ComputeOrder(kind, np.full_like(kind, device), micro_batch)
