"""The cost of snapshots: bytes of weights and optimizer states, over the host link of a device."""

from __future__ import annotations

from weft.methods.snapshot.program import PIECES
from weft.predict.cost.hooks import CostOf, Taken, by_table
from weft.predict.cost.host_link import SOURCE, SPREAD, host_copy_s
from weft.predict.cost.memory import STEPPED_BYTES, stage_parameters
from weft.predict.cost.pricing import Pricing
from weft.program.arrays import Ints


def _copied(pricing: Pricing, rows: Ints) -> Taken:
    placed, columns, plan = pricing.placed, pricing.program.columns, pricing.plan
    element = STEPPED_BYTES[plan.precision]

    def place_s(stage: int, devices: int) -> tuple[float, float, float]:
        parameters = stage_parameters(pricing.model.graph, plan.stages[stage].layers, placed.shape(stage))
        moved_bytes = -(-parameters * (element + plan.optimizer.kept_bytes(element)) // PIECES)
        return max(host_copy_s(one, moved_bytes) for one in placed.device_sets[devices]), 0.0, 0.0

    taken = by_table(place_s, columns.stage[rows], placed.device_set_of_rank[columns.rank[rows]])
    return taken._replace(spread=SPREAD, sources=frozenset({SOURCE}))


COSTS = (CostOf(kind="snapshot", hook=_copied),)
