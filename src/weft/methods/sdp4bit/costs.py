"""The costs of SDP4Bit: the sums inside nodes, and the ranges of weights that replicas keep apart."""

from __future__ import annotations

import numpy as np

from weft.methods.sdp4bit.options import inside_wire, keeps_apart
from weft.predict.cost.hooks import CostOf, synchronising_hook
from weft.predict.cost.memory import stage_parameters
from weft.predict.cost.network import Network
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import Held, ResidentBytes
from weft.predict.cost.traffic import TrafficOf


def _own_ranges(pricing: Pricing) -> Held:
    """Return the bytes of the ranges of a rank's stages that it keeps apart from what all replicas have."""
    held, plan = np.zeros(pricing.program.ranks, dtype=np.int64), pricing.plan
    if keeps_apart(plan):
        for index, stage in enumerate(plan.stages):
            parameters = stage_parameters(pricing.model.graph, stage.layers, pricing.placed.shape(index))
            own = -(-parameters // plan.sharers(index))
            held[pricing.placed.ranks_of_stage[index].ravel()] += plan.element_bytes * own
    return Held(held)


COSTS = (
    CostOf(
        kind="reduce_inside", hook=synchronising_hook(lambda pricing: Network.reduce_scatter, inside_wire)
    ),
    CostOf(kind="reduce_between", hook=synchronising_hook(lambda pricing: Network.reduce_scatter)),
    TrafficOf(kind="reduce_inside", ways=lambda plan: 1, wire=inside_wire),
    TrafficOf(kind="reduce_between", ways=lambda plan: 1),
    ResidentBytes(what="own ranges of weights", hook=_own_ranges),
)
