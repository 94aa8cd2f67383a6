"""The bytes of frozen weights: every rank of a stage holds them, in the compute precision or in few bits."""

from __future__ import annotations

import numpy as np

from weft.describe.device import PRECISION_BYTES
from weft.predict.cost.memory import frozen_bytes
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import Held, ResidentBytes


def _frozen(pricing: Pricing) -> Held:
    held = np.zeros(pricing.program.ranks, dtype=np.int64)
    for index, stage in enumerate(pricing.plan.stages):
        for ranks, shape in pricing.placed.holders(index):
            held[ranks] += frozen_bytes(
                pricing.model.graph, stage.layers, shape, PRECISION_BYTES[pricing.plan.precision]
            )
    return Held(held)


COSTS = (ResidentBytes(what="frozen weights", hook=_frozen),)
