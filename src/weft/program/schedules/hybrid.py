"""Hybrid of breadth-first and depth-first: the breadth-first order, repeated for groups of micro-batches.

The orders are those of Fast-LLM with `depth_first_micro_batches` = `depth`: D rounds of M / D micro-batches.
Here round d runs micro-batches `d M / D`, `d M / D + 1` and so on; every stage still counts 0, 1, 2, ....
The bubble overhead is `D (P - 1) / (M v)` on P devices with v loops, if a round has at least P micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from weft.program.schedules.base import ComputeOrder, Options, Pipeline
from weft.program.schedules.breadth_first import BreadthFirst
from weft.program.schedules.ring import (
    OnRing,
    count_option,
    divisors,
    refuse_count,
)


class Hybrid(OnRing):
    """A `depth`-th of breadth-first's activations for `depth` times its bubble."""

    name: ClassVar[str] = "hybrid"
    synonyms: ClassVar[tuple[str, ...]] = ("breadth-first-depth-first", "bf-df")
    options: ClassVar[Mapping[str, str]] = {
        "depth": "rounds of equally many micro-batches, a divisor of their number; by default as many as "
        "leave every device a micro-batch per round"
    }

    def refuse(self, pipeline: Pipeline, options: Options) -> str | None:
        reason = super().refuse(pipeline, options) or refuse_count(self.name, "depth", options)
        if reason is not None:
            return reason
        depth = depth_of(pipeline, options)
        if pipeline.micro_batches % depth == 0:
            return None
        nearest = min(divisors(pipeline.micro_batches), key=lambda other: (abs(other - depth), other))
        return (
            f"hybrid cannot split {pipeline.micro_batches} micro-batches into {depth} equal rounds; "
            f"nearest depth: {nearest}"
        )

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        depth = depth_of(pipeline, options)
        breadth = pipeline.micro_batches // depth
        round_ = BreadthFirst().order(Pipeline(pipeline.devices, pipeline.stages, breadth), device, {})
        first = np.repeat(np.arange(depth, dtype=np.int64) * breadth, len(round_.kind))
        return ComputeOrder(
            kind=np.tile(round_.kind, depth),
            stage=np.tile(round_.stage, depth),
            micro_batch=np.tile(round_.micro_batch, depth) + first,
        )


def depth_of(pipeline: Pipeline, options: Options) -> int:
    """Return the rounds of a step: the option `depth`, or the most with a micro-batch per device in each."""
    breadths = ((one, pipeline.micro_batches // one) for one in divisors(pipeline.micro_batches))
    full = [rounds for rounds, breadth in breadths if breadth >= pipeline.devices]
    return count_option("depth", options, max(full, default=1))
