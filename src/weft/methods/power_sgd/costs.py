"""The memory of PowerSGD: errors, factors, and the sum that replicas with sharded states build apart."""

from __future__ import annotations

import numpy as np

from weft.describe.synchronisation import options_in
from weft.methods.power_sgd.options import NAME, PowerSgdOptions
from weft.methods.power_sgd.traffic import matrices_of
from weft.predict.cost.memory import own_parameters, plan_states
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import Held, ResidentBytes


def _kept(pricing: Pricing) -> Held:
    """Return the bytes of a rank's errors and right factors, and of the largest sum that it builds apart.

    The gradient with its error takes the room in which others receive gradients.
    """
    ranks, plan, graph = pricing.program.ranks, pricing.plan, pricing.model.graph
    held, apart = np.zeros(ranks, dtype=np.int64), np.zeros(ranks, dtype=np.int64)
    options = options_in(plan, NAME, PowerSgdOptions)
    if options is None:
        return Held(held)
    element = plan_states(plan).gradients
    for index, stage in enumerate(plan.stages):
        shape, holders = pricing.placed.shape(index), pricing.placed.ranks_of_stage[index].ravel()
        gradient = own_parameters(graph, stage.layers, shape)
        sides = matrices_of(graph, stage.layers, shape)
        held[holders] += element * (gradient + sum(options.rank_of(*one) * one.columns for one in sides))
        apart[holders] = np.maximum(apart[holders], element * gradient)
    return Held(held if plan.sharding == "zero-0" else held + apart)


COSTS = (ResidentBytes(what="errors and factors of gradients", hook=_kept),)
