"""Chimera: two pipelines in opposite directions over the same devices (Li and Hoefler, arXiv 2107.06925).

Device r of D holds stage r of the path down and stage D - 1 - r of the path up. Each path has its own copy
of the weights and half of the micro-batches. A late stage of one path shares its device with an early stage
of the other. The order is that of kazukiosawa/pipe-fisher: M/D rounds of D micro-batches each. A device runs
the last backwards of its own path between the first forwards of the next round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from weft.program.arrays import Ints
from weft.program.kinds import BACKWARD, FORWARD
from weft.program.schedules.base import ComputeOrder, Options, Pipeline
from weft.program.schedules.ring import refuse_loops

# One computation of a device: its kind, and True if it is on the other path. A device's own path is the path
# that reaches it first.
_Word = tuple[int, bool]
_FORWARD_OWN: _Word = (FORWARD, False)
_FORWARD_OTHER: _Word = (FORWARD, True)
_BACKWARD_OWN: _Word = (BACKWARD, False)
_BACKWARD_OTHER: _Word = (BACKWARD, True)


class Chimera:
    """Two opposite paths with a copy of the weights each; with M = P a bubble of P - 2 backwards."""

    name: ClassVar[str] = "chimera"
    synonyms: ClassVar[tuple[str, ...]] = ("bidirectional", "bidirectional-pipeline")
    options: ClassVar[Mapping[str, str]] = {}
    paths: ClassVar[int] = 2

    def refuse(self, pipeline: Pipeline, options: Options) -> str | None:
        reason = refuse_loops(self.name, pipeline)
        if reason is not None:
            return reason
        devices, micro_batches = pipeline.devices, pipeline.micro_batches
        if devices % 2:
            return f"chimera needs an even number of devices, not {devices}; nearest: {devices + 1} devices"
        if micro_batches % devices:
            near = max(1, round(micro_batches / devices)) * devices
            return (
                f"chimera needs a multiple of its {devices} devices as micro-batches, not {micro_batches}; "
                f"nearest: {near} micro-batches"
            )
        return None

    def placement(self, pipeline: Pipeline) -> Ints:
        down = np.arange(pipeline.devices, dtype=np.int64)
        return np.stack([down, down[::-1]])

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        devices, half = pipeline.devices, pipeline.micro_batches // 2
        words = np.array(_pattern(devices, device, pipeline.micro_batches // devices), dtype=np.int64)
        kind, other = words[:, 0], words[:, 1].astype(np.bool_)
        up = other != (device >= devices // 2)
        micro_batch = np.empty_like(kind)
        for code in (FORWARD, BACKWARD):
            for path, mine in enumerate((~up, up)):
                # Every kind on every path takes the path's micro-batches in order.
                micro_batch[(kind == code) & mine] = np.arange(path * half, (path + 1) * half)
        return ComputeOrder(kind, np.where(up, devices - 1 - device, device), micro_batch)


def _pattern(devices: int, device: int, rounds: int) -> list[_Word]:
    """Return the computations of a device, in order.

    In a half round of its own path, `ahead` forwards come before the other path reaches the device.
    """
    half = devices // 2
    ahead = half - device if device < half else device - half + 1
    later = half - ahead
    words: list[_Word] = []
    for number in range(rounds):
        first = [_FORWARD_OWN] if number == 0 else [_BACKWARD_OWN, _FORWARD_OWN]
        words += [
            *first * ahead,
            *[_FORWARD_OTHER, _FORWARD_OWN] * later,
            *[_FORWARD_OTHER, _BACKWARD_OTHER] * ahead,
            *[_BACKWARD_OWN, _BACKWARD_OTHER] * later,
        ]
    return words + [_BACKWARD_OWN] * ahead
