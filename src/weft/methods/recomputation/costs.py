"""What recomputation keeps on a rank all the time."""

from __future__ import annotations

import numpy as np

from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import Held, ResidentBytes, per_place


def _again(pricing: Pricing) -> Held:
    """Activations of the one layer that a backward pass has run forward again."""
    room = np.zeros(pricing.program.ranks, dtype=np.int64)
    if pricing.program.obligations.purpose != "train":
        return Held(room)
    largest = per_place(pricing, pricing.model.compute.recomputed_bytes)
    for index, ranks in enumerate(pricing.placed.ranks_of_stage):
        room[ranks] = np.maximum(room[ranks], largest[index, pricing.placed.device_set_of_rank[ranks]])
    return Held(room)


COSTS = (ResidentBytes(what="the layer that is recomputed", hook=_again),)
