"""The costs of exchanges of experts as instructions, and of the segments between them."""

from __future__ import annotations

import numpy as np

from weft.describe.device import Device
from weft.describe.expert_pieces import expert_pieces
from weft.methods.expert_exchanges.memory import rows_kept, taken_bytes
from weft.methods.expert_exchanges.program import NAME
from weft.predict.cost.exchanges import COUNT_BYTES, Exchanges, expert_exchanges
from weft.predict.cost.hooks import CostOf, Taken, collective_hook
from weft.predict.cost.network import Network
from weft.predict.cost.pricing import Pricing, SegmentShares, StageShares
from weft.predict.cost.residency import LiveBytes
from weft.program.arrays import Ints

_all_to_all = collective_hook(lambda pricing: Network.all_to_all)


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


def _left(pricing: Pricing, stage: int, replica: int, exchanges: Exchanges) -> Exchanges:
    """Return the sums of the loss and of the gradient."""
    ranks = tuple(pricing.placed.ranks_of_stage[stage][replica].tolist())
    plan, model = pricing.plan, pricing.model
    return expert_exchanges(plan, model.graph, model.network, stage, rows=False)(ranks)


COSTS = (
    CostOf(kind="expert_dispatch", hook=_dispatch),
    CostOf(kind="expert_combine", hook=_all_to_all),
    CostOf(kind="expert_combine_backward", hook=_all_to_all),
    CostOf(kind="expert_dispatch_backward", hook=_all_to_all),
    SegmentShares(method=NAME, shares=_shares, left=_left, taken=taken_bytes),
    LiveBytes(what="rows kept at borders", hook=rows_kept),
)
