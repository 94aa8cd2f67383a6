"""The costs of CLAN: codecs, exchanges of encoded pieces, and the errors that ranks keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

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
    plans_of_codecs,
)
from weft.predict.cost.hooks import CostHook, CostOf, Taken, TimeOf, codecs_s, synchronising_hook
from weft.predict.cost.memory import own_parameters, plan_states
from weft.predict.cost.network import Network
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import Held, ResidentBytes
from weft.predict.cost.traffic import TrafficOf
from weft.program.arrays import Ints

WireOf = Callable[[Plan], Wire]


def _by_codec(hook_of: Callable[[WireOf], CostHook], wire: WireOf) -> CostHook:
    """Return the cost hook of rows whose pieces have several codecs, from that of one wire."""

    def hook(pricing: Pricing, rows: Ints) -> Taken:
        occupancy, latency, link = np.zeros((3, len(rows)))
        spread, sources = 0.0, frozenset[str]()
        for plan, mine in plans_of_codecs(pricing.plan, pricing.program, rows):
            if not len(mine):
                continue

            def of_codec(_: Plan, found: Wire = wire(plan)) -> Wire:  # noqa: B008
                return found

            places, taken = np.searchsorted(rows, mine), hook_of(of_codec)(pricing, mine)
            occupancy[places], latency[places], link[places] = taken[:3]
            spread, sources = max(spread, taken.spread), sources | taken.sources
        return Taken(occupancy, latency, link, spread, sources)

    return hook


def _codec_hook(wire_of: WireOf) -> CostHook:
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
_EXCHANGES: Mapping[str, Callable[[Pricing], TimeOf]] = {
    "push": lambda pricing: Network.reduce_scatter,
    "pull": lambda pricing: Network.all_gather,
}
COSTS = (
    *(CostOf(kind=kind, hook=_by_codec(_codec_hook, wire)) for kind, wire in _CODECS.items()),
    *(
        CostOf(kind=kind, hook=_by_codec(partial(synchronising_hook, time_of), exchange_wire))
        for kind, time_of in _EXCHANGES.items()
    ),
    *(
        TrafficOf(kind=kind, ways=lambda plan: 1, wire=exchange_wire, plans=plans_of_codecs)
        for kind in _EXCHANGES
    ),
    # They have the time of codecs, and send nothing.
    *(
        TrafficOf(kind=kind, ways=lambda plan: 0, wire=wire, plans=plans_of_codecs)
        for kind, wire in _CODECS.items()
    ),
    ResidentBytes(what="errors of compressed gradients", hook=_kept),
)
