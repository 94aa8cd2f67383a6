"""The costs of an averaging: an all-reduce of a stage's weights, the computation on them, and kept states."""

from __future__ import annotations

import numpy as np

from weft.methods.local_averaging.options import options_of
from weft.predict.cost.hooks import CostOf, synchronising_hook
from weft.predict.cost.memory import plan_states, stage_parameters
from weft.predict.cost.network import Network
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import Held, ResidentBytes
from weft.predict.cost.traffic import TrafficOf


def _outer_states(pricing: Pricing) -> Held:
    """Return the bytes of an outer step: the last averaged weights of a rank's stages, and their momentum."""
    held, plan = np.zeros(pricing.program.ranks, dtype=np.int64), pricing.plan
    options = options_of(plan)
    if options is not None and options.steps_outside:
        element = 2 * plan_states(plan).gradients
        for index, stage in enumerate(plan.stages):
            parameters = stage_parameters(pricing.model.graph, stage.layers, pricing.placed.shape(index))
            held[pricing.placed.ranks_of_stage[index].ravel()] += element * parameters
    return Held(held)


COSTS = (
    CostOf(kind="average_weights", hook=synchronising_hook(lambda pricing: Network.all_reduce)),
    TrafficOf(kind="average_weights", ways=lambda plan: 2),
    ResidentBytes(what="states of the outer step", hook=_outer_states),
)
