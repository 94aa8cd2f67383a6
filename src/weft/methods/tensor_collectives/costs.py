"""The costs of tensor collectives as instructions, and of the segments between them."""

from __future__ import annotations

from itertools import accumulate, repeat

import numpy as np

from weft.describe.device import Device
from weft.describe.layer_pieces import cut_of
from weft.methods.tensor_collectives.program import NAME, crossed, stage_borders
from weft.predict.cost.exchanges import Exchanges, tensor_exchanges_s
from weft.predict.cost.hooks import CostOf, Taken, collective_hook
from weft.predict.cost.network import Network
from weft.predict.cost.pricing import Pricing, SegmentExchanges, SegmentShares, StageShares
from weft.predict.cost.residency import LiveBytes, kept_by_segments
from weft.program.arrays import Ints
from weft.program.segments import StageSegments

_all_reduce = collective_hook(lambda pricing: Network.all_reduce)


def _exchange(pricing: Pricing, rows: Ints) -> Taken:
    """Return the times of an all-reduce, or of half of it: a gather, or a reduce-scatter."""
    stages = range(len(pricing.plan.stages))
    parts = np.array([0.5 if pricing.placed.shape(one).sequence_parallel > 1 else 1.0 for one in stages])
    part, taken = parts[pricing.program.columns.stage[rows]], _all_reduce(pricing, rows)
    return taken._replace(occupancy=part * taken.occupancy, link=part * taken.link)


def _shares(pricing: Pricing, stage: int, device: Device) -> StageShares:
    plan, graph, compute = pricing.plan, pricing.model.graph, pricing.model.compute
    shape = pricing.placed.shape(stage)
    pieces = compute.piece_times(graph, plan.stages[stage].layers, shape, plan.precision, device)
    divides, borders = shape.sequence_parallel > 1, stage_borders(plan, graph, stage)
    segment_of = {
        backward: [
            0,
            *accumulate(crossed(one.enters, divides_sequence=divides, backward=backward) for one in borders),
        ]
        for backward in (False, True)
    }
    contained_s = 0.0
    if compute.contains_exchanges(device, shape):
        ranks = tuple(pricing.placed.ranks_of_stage[stage][0].tolist())
        all_s, left_s = tensor_exchanges_s(plan, graph, pricing.model.network, stage, ranks)
        contained_s = all_s - left_s
    recompute = plan.stages[stage].recompute
    return StageShares.of_pieces(pieces, recompute, segment_of[False], segment_of[True], contained_s)


def _left(pricing: Pricing, stage: int, replica: int, segments: StageSegments) -> SegmentExchanges:
    """Return the exchanges of a loss, if times of computations do not contain them."""
    ranks = tuple(pricing.placed.ranks_of_stage[stage][replica].tolist())
    device, shape = pricing.model.cluster.device_of(ranks[0]), pricing.placed.shape(stage)
    left_s = 0.0
    if not pricing.model.compute.contains_exchanges(device, shape):
        left_s = tensor_exchanges_s(pricing.plan, pricing.model.graph, pricing.model.network, stage, ranks)[1]
    last = Exchanges(forward_s=left_s, backward_s=left_s)
    return SegmentExchanges(
        *((*repeat(Exchanges(), len(borders)), last) for borders in (segments.forward, segments.backward))
    )


def _values_kept(pricing: Pricing) -> Ints:
    """Return the changes of bytes by the values that crossed borders, and the streams beside branches."""
    plan, graph = pricing.plan, pricing.model.graph

    def elements(stage: int) -> float:
        shape = plan.shape(stage)
        found = 0.0
        for layer in plan.stages[stage].layers if plan.stages[stage].recompute != "none" else ():
            borders = cut_of(graph.layers[layer]).borders
            ends = [one.elements(shape) / shape.sequence_parallel for one in borders if not one.enters]
            found += sum(one.elements(shape) for one in borders if one.enters) + sum(ends) + sum(ends[1:])
        return found

    return kept_by_segments(pricing, NAME, elements)


COSTS = (
    CostOf(kind="tensor_forward", hook=_exchange),
    CostOf(kind="tensor_backward", hook=_exchange),
    SegmentShares(method=NAME, shares=_shares, left=_left),
    LiveBytes(what="values kept at borders", hook=_values_kept),
)
