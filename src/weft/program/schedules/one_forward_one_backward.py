"""1F1B: a short warm-up, then one forward and one backward in turn (PipeDream-Flush, arXiv 2006.09503).

The order is Megatron-LM's: device r warms up with min(M, P - 1 - r) forwards, so that it never holds more
than min(M, P - r) micro-batches; M < P is legal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from weft.program.kinds import BACKWARD, FORWARD
from weft.program.program import Ints
from weft.program.schedules.base import ComputeOrder, Options, Pipeline


class OneForwardOneBackward:
    """One stage per device; the bubble of GPipe with the activations of at most P micro-batches."""

    name: ClassVar[str] = "1f1b"
    synonyms: ClassVar[tuple[str, ...]] = ("Schedule1F1B", "one-forward-one-backward", "pipedream-flush")
    options: ClassVar[Mapping[str, str]] = {}

    def refuse(self, pipeline: Pipeline, options: Options) -> str | None:
        if pipeline.stages != pipeline.devices:
            return (
                f"1f1b runs one stage per device, not {pipeline.stages} stages on {pipeline.devices} devices"
            )
        return None

    def placement(self, pipeline: Pipeline) -> Ints:
        return np.arange(pipeline.stages, dtype=np.int64)

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        total = pipeline.micro_batches
        warm_up = min(total, pipeline.devices - 1 - device)
        micro_batches = np.arange(total, dtype=np.int64)
        # Forward m starts after the backward of m - warm_up - 1 and before the backward of m - warm_up.
        turn = np.concatenate([2 * np.maximum(micro_batches - warm_up, -1), 2 * micro_batches + 1])
        sequence = np.argsort(turn, kind="stable")
        kind = np.repeat(np.array([FORWARD, BACKWARD], dtype=np.int64), total)
        return ComputeOrder(
            kind=kind[sequence],
            stage=np.full(2 * total, device, dtype=np.int64),
            micro_batch=np.tile(micro_batches, 2)[sequence],
        )
