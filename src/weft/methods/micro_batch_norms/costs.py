"""The costs of micro-batch norms: a read of every gradient, and an exchange of one number per micro-batch."""

from __future__ import annotations

import numpy as np

from weft.methods.micro_batch_norms.program import options
from weft.predict.cost.compute import StageTimes
from weft.predict.cost.exchanges import Exchanges
from weft.predict.cost.hooks import AddedWork, CostOf, collective_hook
from weft.predict.cost.memory import gradient_element_bytes, own_parameters
from weft.predict.cost.network import Network
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import Held, ResidentBytes


def _chosen(pricing: Pricing) -> bool:
    return bool(options(pricing.plan, pricing.model.graph))


def _seen(pricing: Pricing, stage: int, times: StageTimes, exchanges: Exchanges) -> float:
    """Return the seconds to read a stage's whole gradient, after ranks with parts of it add them up."""
    if not _chosen(pricing):
        return 0.0
    return times.read_gradients_s * pricing.plan.sharers(stage) + exchanges.gradient_s


def _parts(pricing: Pricing) -> Held:
    """Return the bytes of one micro-batch's gradient, on ranks that add up their tokens' parts of it."""
    held, plan = np.zeros(pricing.program.ranks, dtype=np.int64), pricing.plan
    if not _chosen(pricing):
        return Held(held)
    for index, stage in enumerate(plan.stages):
        if plan.grid(index).context > 1:
            count = own_parameters(pricing.model.graph, stage.layers, pricing.placed.shape(index))
            held[pricing.placed.ranks_of_stage[index]] += gradient_element_bytes(plan) * count
    return Held(held)


COSTS = (
    CostOf(kind="micro_batch_norms", hook=collective_hook(lambda pricing: Network.all_reduce)),
    AddedWork(kind="backward", seconds=_seen),
    AddedWork(kind="backward_weight", seconds=_seen),
    ResidentBytes(what="gradients of one micro-batch", hook=_parts),
)
