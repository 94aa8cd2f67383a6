"""The costs of exchanges of experts as instructions, and of the segments between them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from weft.describe.amount import Shape
from weft.describe.device import Device
from weft.describe.expert_pieces import expert_pieces
from weft.methods.expert_exchanges.memory import rows_kept, taken_bytes
from weft.methods.expert_exchanges.program import NAME
from weft.predict.cost.exchanges import (
    COUNT_BYTES,
    Exchanges,
    context_exchanges,
    expert_exchanges,
    row_exchange,
    tensor_exchanges,
)
from weft.predict.cost.hooks import CostOf, Taken, TimeOf, collective_hook
from weft.predict.cost.network import Network
from weft.predict.cost.pricing import Pricing, SegmentExchanges, SegmentShares, StageShares
from weft.predict.cost.residency import LiveBytes
from weft.program.arrays import Ints
from weft.program.segments import StageSegments


def _row_exchange(pricing: Pricing) -> TimeOf:
    return lambda network, spread, moved_bytes: row_exchange(network, pricing.plan)(spread, moved_bytes)


_all_to_all = collective_hook(_row_exchange)


def _count_bytes(pricing: Pricing, rows: Ints) -> Ints:
    counts = COUNT_BYTES * pricing.model.graph.experts * pricing.plan.ep
    return np.full(len(rows), counts, dtype=np.int64)


_counts = collective_hook(lambda pricing: Network.all_gather, _count_bytes)


def _dispatch(pricing: Pricing, rows: Ints) -> Taken:
    """Return the times of an all-to-all behind a gather of counts."""
    taken, first = _all_to_all(pricing, rows), _counts(pricing, rows)
    return taken._replace(occupancy=taken.occupancy + first.occupancy, link=taken.link + first.link)


def _shares(pricing: Pricing, stage: int, device: Device) -> StageShares:
    plan, model = pricing.plan, pricing.model
    layers, shape = plan.stages[stage].layers, pricing.placed.shape(stage)
    pieces = model.compute.piece_times(
        model.graph, layers, shape, plan.precision, device, pieces_of=expert_pieces
    )
    segments = range(len(pieces))
    return StageShares.of_pieces(pieces, plan.stages[stage].recompute, segments, segments)


def _left(pricing: Pricing, stage: int, replica: int, segments: StageSegments) -> SegmentExchanges:
    """Return the exchanges of tensor and context ranks, and the sums of the loss and of the gradient."""
    ranks = tuple(pricing.placed.ranks_of_stage[stage][replica].tolist())
    graph, shape, network = pricing.model.graph, pricing.placed.shape(stage), pricing.model.network
    of_tokens = [expert_exchanges(pricing.plan, graph, network, stage, rows=False)(ranks)]
    if shape.context_parallel > 1:
        of_tokens.append(context_exchanges(pricing.plan, graph, network, stage)(ranks))
    of_tensor = [Exchanges()] * len(of_tokens[0])
    device = pricing.model.cluster.device_of(ranks[0])
    if shape.tensor_parallel > 1 and not pricing.model.compute.contains_exchanges(device, shape):
        of_tensor = tensor_exchanges(pricing.plan, graph, network, stage)(ranks)
    rows, behind = graph.amounts("dispatched", shape), _behind(shape)
    found: list[list[Exchanges]] = [[]]
    for layer, tensor, *others in zip(pricing.plan.stages[stage].layers, of_tensor, *of_tokens, strict=True):
        found[-1] += others
        if rows[layer]:
            found[-1].append(_part(tensor, [1.0 - one for one in behind]))
            found += [], [_part(tensor, behind)]
        else:
            found[-1].append(tensor)
    each = tuple(map(Exchanges.total, found))
    return SegmentExchanges(each, each)


def _behind(shape: Shape) -> Exchanges:
    """Return the parts of a mixture's tensor exchanges that come behind its experts, forward and backward.

    Ranks add up once for attention and once for the mixture. If they divide the sequence, both are a gather
    and a scatter, in either pass. Otherwise they add up where a pass leaves what they divide.
    """
    if shape.sequence_parallel > 1:
        return Exchanges(0.25, 0.25, 0.25)
    return Exchanges(forward_s=0.5, backward_s=0.0, again_s=0.5)


def _part(exchanges: Exchanges, parts: Iterable[float]) -> Exchanges:
    return Exchanges(*(part * one for part, one in zip(parts, exchanges, strict=True)))


COSTS = (
    CostOf(kind="expert_dispatch", hook=_dispatch),
    CostOf(kind="expert_combine", hook=_all_to_all),
    CostOf(kind="expert_combine_backward", hook=_all_to_all),
    CostOf(kind="expert_dispatch_backward", hook=_all_to_all),
    SegmentShares(method=NAME, shares=_shares, left=_left, taken=taken_bytes),
    LiveBytes(what="rows kept at borders", hook=rows_kept),
)
