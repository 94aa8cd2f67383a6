"""What an averaging costs: an all-reduce of a stage's weights, and passes over them."""

from __future__ import annotations

import numpy as np

from weft.methods.local_averaging.kinds import AVERAGE_WEIGHTS
from weft.predict.cost.hooks import CostOf, Taken, collective_hook
from weft.predict.cost.network import Network
from weft.predict.cost.pricing import Pricing
from weft.program.codes import distinct_rows
from weft.program.kinds import KINDS
from weft.program.program import Ints

# Weights are read and written to be weighted, and once more to be given back.
_PASSES = 4.0

_all_reduce = collective_hook(lambda pricing: Network.all_reduce)


def _average(pricing: Pricing, rows: Ints) -> Taken:
    columns = pricing.program.columns
    moved = _all_reduce(pricing, rows)
    sets = pricing.placed.device_set_of_rank[columns.rank[rows]]
    first, which = distinct_rows(columns.stage[rows], sets)
    places = zip(columns.stage[rows][first].tolist(), sets[first].tolist(), strict=True)
    seconds = [_PASSES * _read_s(pricing, stage, devices) for stage, devices in places]
    return moved._replace(occupancy=moved.occupancy + np.array(seconds)[which])


def _read_s(pricing: Pricing, stage: int, devices: int) -> float:
    """Seconds in which the slowest of a set of devices reads the weights of a stage as they are stepped."""
    placed = pricing.placed
    return max(
        times.read_gradients_s / speed
        for times, speed in zip(placed.stage_times[stage, devices], placed.speed_sets[devices], strict=True)
    )


COSTS = (CostOf(kind=KINDS[AVERAGE_WEIGHTS].name, hook=_average),)
