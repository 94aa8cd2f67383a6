"""Live bytes of a rank over a step: its permanent bytes, and the changes by its instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from weft.predict.costs import Costs
from weft.program.arrays import Ints
from weft.program.program import NONE, Program

if TYPE_CHECKING:
    from weft.predict.predict import PredictedStep


def peak_live_bytes(program: Program, costs: Costs, end: Ints, period: float) -> tuple[Ints, Ints]:
    """Return each rank's peak live bytes and the row that ends at the peak; -1 for ranks without rows.

    Two cycles, `period` ticks apart, count. A rank may receive early for the next step while it still holds
    bytes of this one. At equal times additions come first. Both arrays have shape (ranks,).
    """
    changing = np.flatnonzero(costs.live_bytes)
    peak = costs.base_bytes.copy()
    position = np.where(np.diff(program.rank_starts) > 0, program.rank_starts[:-1], NONE)
    # Rank by rank: sorting a few thousand changes at a time is faster than millions at once.
    starts = np.searchsorted(changing, program.rank_starts)
    for one in np.flatnonzero(np.diff(starts)).tolist():
        mine = changing[starts[one] : starts[one + 1]]
        change = np.tile(costs.live_bytes[mine], 2)
        times = np.concatenate([end[mine], end[mine] + round(period)])
        order = np.lexsort((change < 0, times))
        held = np.cumsum(change[order])
        highest = int(np.argmax(held))
        if held[highest] > 0:
            peak[one] += held[highest]
            position[one] = mine[order[highest] % len(mine)]
    return peak, position


def live_curve(program: Program, predicted: PredictedStep, rank: int) -> list[tuple[float, int]]:
    """Return (seconds since the start of the step, bytes live from then on) of one rank, in order of time."""
    costs, timeline = predicted.priced.costs, predicted.simulation.timeline
    mine = np.flatnonzero((timeline.rank == rank) & (costs.live_bytes[timeline.position] != 0))
    change = costs.live_bytes[timeline.position[mine]]
    order = np.lexsort((change < 0, timeline.end_ns[mine]))
    live = int(costs.base_bytes[rank]) + np.cumsum(change[order])
    seconds = timeline.end_ns[mine][order] / 1e9
    start = (0.0, int(costs.base_bytes[rank]))
    return [start, *zip(seconds.tolist(), live.tolist(), strict=True)]
