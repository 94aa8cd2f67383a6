"""The costs of CLAN: codecs, exchanges of encoded pieces, and the errors that ranks keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from weft.describe.plan import Plan
from weft.describe.synchronisation import Wire
from weft.methods.clan.options import IN_FLIGHT
from weft.methods.clan.pieces import (
    PiecedStages,
    aggregate_wire,
    compress_wire,
    decompress_wire,
    exchange_wire,
    plans_of_codecs,
)
from weft.predict.cost.hooks import (
    CostHook,
    CostOf,
    Taken,
    TimeOf,
    by_table,
    carried,
    codecs_s,
    synchronising_hook,
)
from weft.predict.cost.memory import own_parameters, plan_states
from weft.predict.cost.network import Network
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import Held, ResidentBytes
from weft.predict.cost.traffic import TrafficOf
from weft.program.arrays import Ints

WireOf = Callable[[Plan], Wire]

# Of the sum of a share: itself, in fp32, decoded, and one that is decoded beside it.
WORKING_COPIES = 4


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


def _served_hook(wire_of: WireOf) -> CostHook:
    """Return the cost hook of an exchange between replicas and servers, the same in both directions."""

    def hook(pricing: Pricing, rows: Ints) -> Taken:
        columns, servers = pricing.program.columns, pricing.plan.servers
        network = pricing.model.network.carrying(wire_of(pricing.plan))

        def group_s(group: int, moved_bytes: int) -> tuple[float, float, float]:
            replicas = [rank for rank in pricing.program.groups[group] if rank not in servers]
            taken = network.many_to_many(replicas, servers, moved_bytes)
            return taken.seconds, 0.0, taken.link_s

        return carried(pricing, by_table(group_s, columns.group[rows], columns.bytes[rows]))

    return hook


def _codec_hook(wire_of: WireOf) -> CostHook:
    """Return the cost hook of an instruction that encodes or decodes and meets no other rank."""

    def hook(pricing: Pricing, rows: Ints) -> Taken:
        nothing = np.zeros(len(rows))
        return Taken(codecs_s(pricing, rows, wire_of(pricing.plan)), nothing, nothing)

    return hook


def _kept(pricing: Pricing) -> Held:
    """Return the bytes of a rank's errors: of its own gradient, and of the sums that it owns.

    A server also counts the codes that it takes and gives, and the sums that it encodes.
    """
    plan, graph = pricing.plan, pricing.model.graph
    held = np.zeros(pricing.program.ranks, dtype=np.int64)
    stages = PiecedStages.of(plan, graph)
    if stages is None:
        return Held(held)
    options, each, servers = stages.options, plan_states(plan).gradients, list(plan.servers)
    for index, stage in enumerate(plan.stages):
        ranks, copies = pricing.placed.ranks_of_stage[index].ravel(), len(stage.replicas)
        owned = -(-stages.piece_bytes[index] // (len(servers) or copies))
        if options.keeps_errors:
            held[ranks] += each * own_parameters(graph, stage.layers, pricing.placed.shape(index))
            held[servers or ranks] += owned
        if servers:
            share = -(-owned // stages.pieces[index])
            sent = share * exchange_wire(plan).between
            taken = min(IN_FLIGHT, stages.pieces[index]) * (copies + 1) * sent
            held[servers] += round(taken + WORKING_COPIES * share)
    return Held(held)


_CODECS = {"compress": compress_wire, "aggregate": aggregate_wire, "decompress": decompress_wire}
_EXCHANGES: Mapping[str, Callable[[Pricing], TimeOf]] = {
    "push": lambda pricing: Network.reduce_scatter,
    "pull": lambda pricing: Network.all_gather,
}
_SERVED = ("push_to_servers", "pull_from_servers")
COSTS = (
    *(CostOf(kind=kind, hook=_by_codec(_codec_hook, wire)) for kind, wire in _CODECS.items()),
    *(
        CostOf(kind=kind, hook=_by_codec(partial(synchronising_hook, time_of), exchange_wire))
        for kind, time_of in _EXCHANGES.items()
    ),
    *(CostOf(kind=kind, hook=_by_codec(_served_hook, exchange_wire)) for kind in _SERVED),
    *(
        TrafficOf(kind=kind, ways=lambda plan: 1, wire=exchange_wire, plans=plans_of_codecs)
        for kind in (*_EXCHANGES, *_SERVED)
    ),
    # They have the time of codecs, and send nothing.
    *(
        TrafficOf(kind=kind, ways=lambda plan: 0, wire=wire, plans=plans_of_codecs)
        for kind, wire in _CODECS.items()
    ),
    ResidentBytes(what="errors of compressed gradients", hook=_kept),
)
