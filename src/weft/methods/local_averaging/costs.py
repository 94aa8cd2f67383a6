"""The costs of an averaging: an exchange of a stage's weights, the computation on them, and kept states."""

from __future__ import annotations

import numpy as np

from weft.describe.synchronisation import kept_numbers
from weft.predict.cost.hooks import CostOf, synchronising_hook
from weft.predict.cost.memory import plan_states, stage_parameters
from weft.predict.cost.network import Network
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import Held, ResidentBytes
from weft.predict.cost.traffic import TrafficOf


def _outer_states(pricing: Pricing) -> Held:
    """Return the bytes of an outer step: a rank's part of the last agreed weights, and of their momentum."""
    held, plan = np.zeros(pricing.program.ranks, dtype=np.int64), pricing.plan
    for index, stage in enumerate(plan.stages):
        if numbers := kept_numbers(plan.sync, len(stage.replicas)):
            parameters = stage_parameters(pricing.model.graph, stage.layers, pricing.placed.shape(index))
            kept_bytes = round(numbers * plan_states(plan).gradients * parameters)
            held[pricing.placed.ranks_of_stage[index].ravel()] += kept_bytes
    return Held(held)


COSTS = (
    # A reduce-scatter and an all-gather, as in an all-reduce; the method's `Wire` has the bytes of both.
    CostOf(kind="average_weights", hook=synchronising_hook(lambda pricing: Network.all_reduce)),
    TrafficOf(kind="average_weights", ways=lambda plan: 2),
    ResidentBytes(what="states of the outer step", hook=_outer_states),
)
