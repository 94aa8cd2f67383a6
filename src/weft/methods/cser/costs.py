"""The costs of CSER's meetings: an all-reduce of blocks, or an all-gather of the replicas' own choices.

A returning replica takes all weights from an all-reduce.
"""

from __future__ import annotations

from weft.describe.plan import Plan
from weft.describe.synchronisation import options_in
from weft.methods.cser.options import NAME, CserOptions
from weft.predict.cost.hooks import CostOf, TimeOf, synchronising_hook
from weft.predict.cost.network import Network
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.traffic import TrafficOf


def _adds_up(plan: Plan) -> bool:
    options = options_in(plan, NAME, CserOptions)
    return options is not None and options.compressor == "blocks"


def _collective(pricing: Pricing) -> TimeOf:
    return Network.all_reduce if _adds_up(pricing.plan) else Network.all_gather


def _ways(plan: Plan) -> int:
    return 2 if _adds_up(plan) else 1


COSTS = (
    *(
        part
        for kind in ("synchronise_update", "reset_error")
        for part in (
            CostOf(kind=kind, hook=synchronising_hook(_collective)),
            TrafficOf(kind=kind, ways=_ways),
        )
    ),
    CostOf(kind="rejoin", hook=synchronising_hook(lambda pricing: Network.all_reduce)),
    TrafficOf(kind="rejoin", ways=lambda plan: 2),
)
