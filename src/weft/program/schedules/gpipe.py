"""GPipe: all forwards, then all backwards (Huang et al., arXiv 1811.06965), backwards in FIFO order."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from weft.program.kinds import BACKWARD, FORWARD
from weft.program.schedules.base import ComputeOrder, Options, Pipeline
from weft.program.schedules.ring import OneStagePerDevice


class GPipe(OneStagePerDevice):
    """One stage per device; bubble overhead (devices - 1) / micro_batches."""

    name: ClassVar[str] = "gpipe"
    synonyms: ClassVar[tuple[str, ...]] = ("ScheduleGPipe", "AFAB", "all-forward-all-backward")
    deals: ClassVar[bool] = True

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        count = pipeline.micro_batches // pipeline.stage_copies[device]
        return ComputeOrder(
            kind=np.repeat(np.array([FORWARD, BACKWARD], dtype=np.int64), count),
            stage=np.full(2 * count, device, dtype=np.int64),
            micro_batch=np.tile(np.arange(count, dtype=np.int64), 2),
        )
