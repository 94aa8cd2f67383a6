"""The costs of copies of a weight: their reductions, and their states where nobody shards them."""

from __future__ import annotations

import numpy as np

from weft.describe.synchronisation import AS_IT_IS
from weft.predict.cost.hooks import CostOf, TimeOf, collective_hook
from weft.predict.cost.memory import plan_states, shards_copies, shared_parameters, unshared_bytes
from weft.predict.cost.network import Network
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import Held, ResidentBytes
from weft.predict.cost.traffic import TrafficOf


def _whole_copies(pricing: Pricing) -> Held:
    """Return the bytes of copies of tied weights beyond a shard of them, if their holders shard nothing.

    Other stacks shard them like all weights.
    """
    more = np.zeros(pricing.program.ranks, dtype=np.int64)
    plan = pricing.plan
    if plan.stack != "weft" or shards_copies(plan):
        return Held(more)
    states = plan_states(plan)
    for index, stage in enumerate(plan.stages):
        for one in shared_parameters(pricing.model.graph, stage.layers):
            count = round(one.parameters(pricing.placed.shape(index)))
            whole = unshared_bytes(count, plan.sharers(index), states, plan.sharding)
            more[pricing.placed.ranks_of_stage[index]] += whole
    return Held(more)


def _sum(pricing: Pricing) -> TimeOf:
    """Return the collective by which holders add up: of whole copies, or of ranges that shards share."""
    return Network.exchange if shards_copies(pricing.plan) else Network.all_reduce


COSTS = (
    # Every holder of a whole copy steps all of it.
    CostOf(kind="reduce_tied", hook=collective_hook(_sum)),
    TrafficOf(
        kind="reduce_tied", ways=lambda plan: 1 if shards_copies(plan) else 2, wire=lambda plan: AS_IT_IS
    ),
    ResidentBytes(what="whole copies of tied weights", hook=_whole_copies),
)
