"""1F1B: a short warm-up, then one forward and one backward in turn (PipeDream-Flush, arXiv 2006.09503).

The order is Megatron-LM's: device r warms up with min(M, P - 1 - r) forwards. It never holds more than
min(M, P - r) micro-batches; M < P is legal. With unlike numbers of replicas, those of a stage together keep
the samples of GraphPipe's rule for a chain (`samples_in_flight`).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from weft.describe.layer_graph import chain_edges
from weft.program.schedules.base import ComputeOrder, Options, Pipeline
from weft.program.schedules.graph_1f1b import samples_in_flight
from weft.program.schedules.ring import OneStagePerDevice, take_turns


class OneForwardOneBackward(OneStagePerDevice):
    """One stage per device; the bubble of GPipe with the activations of at most P micro-batches."""

    name: ClassVar[str] = "1f1b"
    synonyms: ClassVar[tuple[str, ...]] = ("Schedule1F1B", "one-forward-one-backward", "pipedream-flush")
    deals: ClassVar[bool] = True

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        stages, count, kept = pipeline.stages, pipeline.micro_batches, pipeline.devices - device
        if pipeline.copies is not None:
            edges, turns, copies = chain_edges(stages), [1] * stages, pipeline.copies[device]
            kept = samples_in_flight(edges, pipeline.copies, turns, count)[device] // copies
            count //= copies
        kind, micro_batch = take_turns(count, min(count, kept - 1))
        return ComputeOrder(kind, np.full_like(kind, device), micro_batch)
