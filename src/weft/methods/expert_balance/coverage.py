"""The part of a step that a stage has counted when its backward passes start, by their order."""

from __future__ import annotations

import numpy as np

from weft.program.arrays import Floats
from weft.program.kinds import BACKWARD, BACKWARD_INPUT, FORWARD, is_any_of
from weft.program.schedules.base import Options, Pipeline, Schedule


def coverage(schedule: Schedule, pipeline: Pipeline, options: Options) -> Floats:
    """Return, for each backward pass of a pipeline, the share of its stage's forward passes that ran before.

    A balance of the step can know the tokens of these passes alone. Before micro-batch m goes back on stage s
    of p, 1f1b has counted min(M, m + p - s) of M micro-batches. The passes are in no order.
    """
    shares = []
    for device in range(pipeline.devices):
        order = schedule.order(pipeline, device, options)
        for stage in np.unique(order.stage):
            kind = order.kind[order.stage == stage]
            counted = np.cumsum(kind == FORWARD)
            shares.append(counted[is_any_of(kind, (BACKWARD, BACKWARD_INPUT))] / counted[-1])
    return np.concatenate(shares)
