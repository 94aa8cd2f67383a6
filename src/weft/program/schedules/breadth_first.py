"""Breadth-first looped pipeline (Lamy-Poirier, arXiv 2211.05953).

Stages go round the devices in a ring. A device runs all micro-batches of one local stage before the next
stage. It goes forward through its stages and then backward, in FIFO order. One loop is GPipe.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from weft.program.kinds import BACKWARD, FORWARD
from weft.program.schedules.base import ComputeOrder, Options, Pipeline
from weft.program.schedules.ring import OnRing, local_stages


class BreadthFirst(OnRing):
    """Any number of stages per device; bubble overhead (devices - 1) / (micro_batches * loops)."""

    name: ClassVar[str] = "breadth-first"
    synonyms: ClassVar[tuple[str, ...]] = ("ScheduleLoopedBFS", "LoopedBFS", "BFPP")

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        local = local_stages(pipeline, device)
        micro_batches = np.arange(pipeline.micro_batches, dtype=np.int64)
        return ComputeOrder(
            kind=np.repeat(np.array([FORWARD, BACKWARD], dtype=np.int64), len(local) * len(micro_batches)),
            stage=np.repeat(np.concatenate([local, local[::-1]]), len(micro_batches)),
            micro_batch=np.tile(micro_batches, 2 * len(local)),
        )
