"""The costs of CLAN: codecs, exchanges of encoded pieces, and the errors that ranks keep."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weft.describe.plan import Plan
from weft.describe.synchronisation import Wire, options_in
from weft.methods.clan.options import NAME, ClanOptions
from weft.methods.clan.pieces import (
    aggregate_wire,
    compress_wire,
    compressed_elements,
    decompress_wire,
    exchange_wire,
)
from weft.predict.cost.hooks import CostHook, CostOf, Taken, codecs_s, synchronising_hook
from weft.predict.cost.memory import own_parameters, plan_states
from weft.predict.cost.network import Network
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import Held, ResidentBytes
from weft.predict.cost.traffic import TrafficOf
from weft.program.arrays import Ints


def _codec_hook(wire_of: Callable[[Plan], Wire]) -> CostHook:
    """Return the cost hook of an instruction that encodes or decodes and meets no other rank."""

    def hook(pricing: Pricing, rows: Ints) -> Taken:
        nothing = np.zeros(len(rows))
        return Taken(codecs_s(pricing, rows, wire_of(pricing.plan)), nothing, nothing)

    return hook


def _kept(pricing: Pricing) -> Held:
    """Return the bytes of a rank's errors: of its own gradient, and of the sums that it owns."""
    plan, graph = pricing.plan, pricing.model.graph
    held = np.zeros(pricing.program.ranks, dtype=np.int64)
    options = options_in(plan, NAME, ClanOptions)
    if options is None or not options.keeps_errors:
        return Held(held)
    for index, stage in enumerate(plan.stages):
        own = own_parameters(graph, stage.layers, pricing.placed.shape(index))
        owned = -(-compressed_elements(options, plan, graph, index) // len(stage.replicas))
        held[pricing.placed.ranks_of_stage[index].ravel()] += plan_states(plan).gradients * (own + owned)
    return Held(held)


_CODECS = {"compress": compress_wire, "aggregate": aggregate_wire, "decompress": decompress_wire}
COSTS = (
    *(CostOf(kind=kind, hook=_codec_hook(wire)) for kind, wire in _CODECS.items()),
    CostOf(kind="push", hook=synchronising_hook(lambda pricing: Network.reduce_scatter, exchange_wire)),
    CostOf(kind="pull", hook=synchronising_hook(lambda pricing: Network.all_gather, exchange_wire)),
    *(TrafficOf(kind=kind, ways=lambda plan: 1, wire=exchange_wire) for kind in ("push", "pull")),
    # They have the time of codecs, and send nothing.
    *(TrafficOf(kind=kind, ways=lambda plan: 0, wire=wire) for kind, wire in _CODECS.items()),
    ResidentBytes(what="errors of compressed gradients", hook=_kept),
)
