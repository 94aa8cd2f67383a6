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

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        micro_batches = np.arange(pipeline.micro_batches, dtype=np.int64)
        return ComputeOrder(
            kind=np.repeat(np.array([FORWARD, BACKWARD], dtype=np.int64), pipeline.micro_batches),
            stage=np.full(2 * pipeline.micro_batches, device, dtype=np.int64),
            micro_batch=np.tile(micro_batches, 2),
        )
