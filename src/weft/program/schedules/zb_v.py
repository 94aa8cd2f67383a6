"""ZB-V: two stages per device, placed in a V, backwards in two parts (Qi et al., arXiv 2401.10241).

The order is that of torch's `ScheduleZBVZeroBubble`. Device r holds stage r on the way down and stage
2 P - 1 - r on the way up. So device 0 has both ends of a micro-batch's forward, and of its backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from weft.program.arrays import Ints
from weft.program.kinds import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from weft.program.schedules.base import ComputeOrder, Options, Pipeline

# One computation of a device: its kind, and True for its stage on the way up.
_Word = tuple[int, bool]
_FORWARD_DOWN: _Word = (FORWARD, False)
_FORWARD_UP: _Word = (FORWARD, True)
_INPUT_DOWN: _Word = (BACKWARD_INPUT, False)
_INPUT_UP: _Word = (BACKWARD_INPUT, True)
_WEIGHT_DOWN: _Word = (BACKWARD_WEIGHT, False)
_WEIGHT_UP: _Word = (BACKWARD_WEIGHT, True)


class ZeroBubbleV:
    """Two stages per device; no idle device between fill and drain when all three parts take equal times."""

    name: ClassVar[str] = "zb-v"
    synonyms: ClassVar[tuple[str, ...]] = ("ScheduleZBVZeroBubble", "ZBV", "zero-bubble-v")
    options: ClassVar[Mapping[str, str]] = {}

    def refuse(self, pipeline: Pipeline, options: Options) -> str | None:
        if pipeline.stages == 2 * pipeline.devices:
            return None
        return (
            f"zb-v runs two stages per device, not {pipeline.stages} stages on {pipeline.devices} devices; "
            f"nearest: {2 * pipeline.devices} stages (2 loops)"
        )

    def placement(self, pipeline: Pipeline) -> Ints:
        down = np.arange(pipeline.devices, dtype=np.int64)
        return np.concatenate([down, down[::-1]])

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        # The pattern needs 2 P - 1 micro-batches; the order omits micro-batches that do not exist.
        micro_batches = max(2 * pipeline.devices - 1, pipeline.micro_batches)
        words = np.array(_pattern(pipeline.devices, device, micro_batches), dtype=np.int64)
        kind, up = words[:, 0], words[:, 1].astype(np.bool_)
        micro_batch = np.empty_like(kind)
        for code in (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT):
            for side in (up, ~up):
                # Every kind on every stage takes the micro-batches in order.
                micro_batch[(kind == code) & side] = np.arange(micro_batches, dtype=np.int64)
        exists = micro_batch < pipeline.micro_batches
        stage = np.where(up, pipeline.stages - 1 - device, device)
        return ComputeOrder(kind[exists], stage[exists], micro_batch[exists])


def _pattern(devices: int, device: int, micro_batches: int) -> list[_Word]:
    """Return the computations of a device, in order; `micro_batches` is at least 2 * devices - 1."""
    after = devices - device
    turn_down = [_FORWARD_DOWN, _INPUT_DOWN, _WEIGHT_DOWN]
    turn_up = [_FORWARD_UP, _INPUT_UP, _WEIGHT_UP]
    full_turns = micro_batches + 1 - after - devices
    return [
        *[_FORWARD_DOWN] * (2 * after - 1),
        *[_FORWARD_UP, _FORWARD_DOWN] * device,
        *turn_up * after,
        *(turn_down + turn_up) * full_turns,
        # All forwards on the way down are done; forwards on the way up follow.
        *(turn_down[1:] + turn_up) * (after - 1),
        *[_INPUT_DOWN, _INPUT_UP] * device,
        *[_INPUT_DOWN, _WEIGHT_DOWN] * after,
        *[_WEIGHT_UP] * device,
        *[_WEIGHT_DOWN] * device,
    ]
