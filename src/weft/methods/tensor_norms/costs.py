"""The costs of tensor norms: a part of the update, and an exchange of a few numbers per tensor.

An update with n exchanges has n + 1 parts, which count as equal.
"""

from __future__ import annotations

from weft.methods.tensor_norms.kinds import owed_by
from weft.predict.cost.compute import StageTimes
from weft.predict.cost.exchanges import Exchanges
from weft.predict.cost.hooks import AddedWork, CostOf, Taken, by_table
from weft.predict.cost.pricing import Pricing
from weft.program.arrays import Ints


def _parts(pricing: Pricing) -> int:
    owed = owed_by(pricing.program)
    return 1 if owed is None else 1 + owed.exchanges


def _exchange(pricing: Pricing, rows: Ints) -> Taken:
    """Return the times of exchanges: a part of the update on the slowest device, then the sum."""
    columns, placed, parts = pricing.program.columns, pricing.placed, _parts(pricing)

    def rank_s(stage: int, devices: int, group: int, moved_bytes: int) -> tuple[float, float, float]:
        times = zip(
            placed.stage_times[stage, devices],
            placed.device_sets[devices],
            placed.speed_sets[devices],
            strict=True,
        )
        computed_s = max(
            pricing.in_program_s(one.update_s / parts, device, speed) for one, device, speed in times
        )
        taken = pricing.model.network.all_reduce(pricing.program.groups[group], moved_bytes)
        return computed_s + taken.seconds, 0.0, taken.link_s

    sets = placed.device_set_of_rank[columns.rank[rows]]
    return by_table(rank_s, columns.stage[rows], sets, columns.group[rows], columns.bytes[rows])


def _run_before(pricing: Pricing, stage: int, times: StageTimes, exchanges: Exchanges) -> float:
    """Return the seconds, below 0, of the parts that the exchanges take over from a step."""
    return times.update_s * (1.0 / _parts(pricing) - 1.0)


COSTS = (CostOf(kind="tensor_norms", hook=_exchange), AddedWork(kind="step", seconds=_run_before))
