"""ZB-H1 on a graph of stages: weight parts fill the waits at forks and joins.

Warm-up is that of GraphPipe (arXiv 2406.17145), and backwards are split as in ZB-H1 (Qi et al., arXiv
2401.10241). The deepest stage keeps the most micro-batches in flight. Another stage runs its weight parts
later, by the difference. So no stage keeps more than the deepest one. On a chain it is ZB-H1.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from weft.program.schedules.base import ComputeOrder, Options, Pipeline
from weft.program.schedules.graph_1f1b import samples_in_flight
from weft.program.schedules.ring import OneStagePerDevice, take_split_turns, take_turns


class GraphZeroBubbleH1(OneStagePerDevice):
    """One stage per device; GraphPipe's warm-up, and backwards in two parts where stages gain by it."""

    name: ClassVar[str] = "graph-zb-h1"
    synonyms: ClassVar[tuple[str, ...]] = ("graph-zero-bubble",)
    options: ClassVar[Mapping[str, str]] = {"whole": "stages with whole backwards, such as 0,2"}
    for_graphs: ClassVar[bool] = True
    deals: ClassVar[bool] = True

    def refuse(self, pipeline: Pipeline, options: Options) -> str | None:
        return super().refuse(pipeline, options) or self._refuse_whole(pipeline, options)

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        copies = pipeline.stage_copies
        # A batch that is too small for the pipeline does not make weight parts come sooner.
        kept = samples_in_flight(pipeline.stage_edges, copies, (1,) * len(copies), sys.maxsize)
        own, deepest = (samples // copies[device] for samples in (kept[device], max(kept)))
        count = pipeline.micro_batches // copies[device]
        warm_up = min(count, own - 1)
        if device in whole_stages(options):
            kind, micro_batch = take_turns(count, warm_up)
        else:
            kind, micro_batch = take_split_turns(count, warm_up, weight_lag=deepest - own)
        return ComputeOrder(kind, np.full_like(kind, device), micro_batch)

    def _refuse_whole(self, pipeline: Pipeline, options: Options) -> str | None:
        words = str(options.get("whole", ""))
        try:
            known = all(0 <= stage < pipeline.stages for stage in whole_stages(options))
        except ValueError:
            known = False
        if known:
            return None
        return f"{self.name}'s whole is {words!r}; stages from 0 to {pipeline.stages - 1} are allowed, as 0,2"


def whole_stages(options: Options) -> frozenset[int]:
    """Return the stages with whole backwards.

    Raises:
        ValueError: for an option that lists no stages.
    """
    return frozenset(int(word) for word in str(options.get("whole", "")).split(",") if word)
