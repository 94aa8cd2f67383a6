"""Depth-first interleaved 1F1B (Megatron-LM, Narayanan et al., arXiv 2104.04473).

Stages go round the devices in a ring. Micro-batches go through all loops in groups of `group_size`. A device
alternates one forward with one backward after a warm-up of `min(M v, 2 (P - 1 - r) + (v - 1) G)` forwards.
It is device r of P, with v loops, M micro-batches and group size G. The order is that of Megatron-LM's
`microbatch_group_size_per_vp_stage`. If P divides M, torch's `ScheduleInterleaved1F1B` has the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from weft.program.arrays import Ints
from weft.program.kinds import FORWARD
from weft.program.schedules.base import ComputeOrder, Options, Pipeline
from weft.program.schedules.ring import (
    OnRing,
    count_option,
    refuse_count,
    take_turns,
)


class DepthFirst(OnRing):
    """Bubble overhead (devices - 1) / (micro_batches * loops) when the devices divide the micro-batches."""

    name: ClassVar[str] = "depth-first"
    synonyms: ClassVar[tuple[str, ...]] = ("ScheduleInterleaved1F1B", "Interleaved1F1B", "interleaved")
    options: ClassVar[Mapping[str, str]] = {
        "group_size": "micro-batches that go through a stage before the device turns to its next stage; "
        "from the number of devices (the default) to the number of micro-batches"
    }

    def refuse(self, pipeline: Pipeline, options: Options) -> str | None:
        reason = super().refuse(pipeline, options) or refuse_count(self.name, "group_size", options)
        if reason is not None:
            return reason
        devices, micro_batches = pipeline.devices, pipeline.micro_batches
        if micro_batches < devices:
            return (
                f"depth-first needs a micro-batch for every device, not {micro_batches} micro-batches on "
                f"{devices} devices; nearest: {devices} micro-batches"
            )
        size = _group_size(pipeline, options)
        if _is_legal(size, pipeline):
            return None
        # One group of all micro-batches is always legal, so there is a nearest size.
        legal = [other for other in range(devices, micro_batches + 1) if _is_legal(other, pipeline)]
        nearest = min(legal, key=lambda other: (abs(other - size), other))
        if not devices <= size <= micro_batches:
            problem = (
                f"depth-first's group size {size} is not between {devices} devices and "
                f"{micro_batches} micro-batches"
            )
        else:
            problem = (
                f"depth-first in groups of {size} would leave a last group of {micro_batches % size} of "
                f"{micro_batches} micro-batches, too few for {devices} devices, and wait for itself"
            )
        return f"{problem}; nearest group_size: {nearest}"

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        size, loops = _group_size(pipeline, options), pipeline.loops
        loop, micro_batch = _depth_first(pipeline, size)
        warm_up = min(len(loop), 2 * (pipeline.devices - 1 - device) + (loops - 1) * size)
        kind, step = take_turns(len(loop), warm_up)
        loop_of = np.where(kind == FORWARD, loop[step], loops - 1 - loop[step])
        stage = loop_of * pipeline.devices + device
        # A device that the ragged last loop does not reach has no stage there.
        there = stage < pipeline.stages
        return ComputeOrder(kind[there], stage[there], micro_batch[step][there])


def _group_size(pipeline: Pipeline, options: Options) -> int:
    return count_option("group_size", options, pipeline.devices)


def _is_legal(size: int, pipeline: Pipeline) -> bool:
    rest = pipeline.micro_batches % size
    return pipeline.devices <= size <= pipeline.micro_batches and (rest == 0 or rest >= pipeline.devices)


def _depth_first(pipeline: Pipeline, size: int) -> tuple[Ints, Ints]:
    """Return the loop and micro-batch of every forward: group by group, in a group loop by loop."""
    loop = np.repeat(np.arange(pipeline.loops, dtype=np.int64), pipeline.micro_batches)
    micro_batch = np.tile(np.arange(pipeline.micro_batches, dtype=np.int64), pipeline.loops)
    sequence = np.lexsort((micro_batch, loop, micro_batch // size))
    return loop[sequence], micro_batch[sequence]
