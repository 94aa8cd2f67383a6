"""The costs of the whole gradient's norm: a read of the gradient, one exchanged number, and the clipping."""

from __future__ import annotations

from weft.methods.gradient_norm.program import options
from weft.predict.cost.compute import StageTimes
from weft.predict.cost.exchanges import Exchanges
from weft.predict.cost.hooks import AddedWork, CostOf, Taken, by_table
from weft.predict.cost.pricing import Pricing
from weft.program.arrays import Ints


def _norm(pricing: Pricing, rows: Ints) -> Taken:
    """Return the times of norms: a rank reads its part of the gradients, then all ranks exchange a number."""
    columns, groups = pricing.program.columns, pricing.program.groups

    def rank_s(rank: int, group: int, moved_bytes: int) -> tuple[float, float, float]:
        taken = pricing.model.network.all_reduce(groups[group], moved_bytes)
        return pricing.placed.read_gradients_s(rank) + taken.seconds, 0.0, taken.link_s

    return by_table(rank_s, columns.rank[rows], columns.group[rows], columns.bytes[rows])


def _clipped(pricing: Pricing, stage: int, times: StageTimes, exchanges: Exchanges) -> float:
    """Return the seconds of clipping, as if every step were clipped: one more read and write of gradients."""
    return 2.0 * times.read_gradients_s if options(pricing.plan, pricing.model.graph) else 0.0


COSTS = (CostOf(kind="norm", hook=_norm), AddedWork(kind="step", seconds=_clipped))
