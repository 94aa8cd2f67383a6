"""The least step of a layout on unlike devices, whatever its places, cuts and shares: nobody waits but for a
pipeline to fill.

A device that takes t_k(l) seconds for a micro-batch in layer l is worth v_k = max_l t(l) / t_k(l) of the
best, where t(l) = min_k t_k(l), which takes W = sum_l t(l). Places with V = sum v_k do M micro-batches in
M W / V, and each of R pipelines with v loops fills and drains while a micro-batch is in the hands of others:

    step >= W ((M - R / v) / V + 1 / v)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weft.describe.layout import Layout

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def ideal_step_s(layout: Layout, micro_batches: int, times_s: Sequence[Floats], pace_of_rank: Ints) -> float:
    """Lower bound of what `weft.planning.planners.weft.stages.deal` says of any placement.

    Args:
        layout: its degrees and loops count.
        micro_batches: of all replicas together.
        times_s: by pace the seconds of one micro-batch, forward and backward, in each layer.
        pace_of_rank: index into `times_s` of each rank of the cluster.
    """
    rows = np.array(times_s)
    fastest = rows.min(axis=0)
    taken = fastest > 0.0
    if not taken.any():
        return 0.0
    worth = (fastest[taken] / rows[:, taken]).max(axis=1)
    places = worth[pace_of_rank[: layout.ranks]].sum() / layout.width
    filling = 1.0 / layout.loops
    computing = (micro_batches - layout.dp * filling) / places
    return float(fastest.sum() * (computing + filling))
