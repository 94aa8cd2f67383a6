"""The costs of whole matrices: products and an exchange before the step, and more states of others.

Where ranks share a stage, all but the last move of the weights goes from the step to the exchange.
"""

from __future__ import annotations

import numpy as np

from weft.methods.whole_matrices.kinds import owed_by
from weft.predict.cost.compute import StageTimes
from weft.predict.cost.exchanges import Exchanges
from weft.predict.cost.hidden_matrices import matrix_parameters
from weft.predict.cost.hooks import AddedWork, CostOf, Taken, by_table
from weft.predict.cost.memory import STEPPED_BYTES, stage_parameters
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import Held, ResidentBytes
from weft.program.arrays import Ints


def _before_s(times: StageTimes) -> float:
    """Return the seconds of an update without its last move, which reads weights and updates, and writes."""
    return max(0.0, times.update_s - 3.0 * times.read_gradients_s)


def _exchange(pricing: Pricing, rows: Ints) -> Taken:
    """Return the times of exchanges: most of the update on the slowest device, then a matrix both ways.

    A rank sends one matrix at most. It counts as an all-to-all of that many bytes to every rank but itself.
    """
    columns, placed, network = pricing.program.columns, pricing.placed, pricing.model.network

    def rank_s(stage: int, devices: int, group: int, moved_bytes: int) -> tuple[float, float, float]:
        times = zip(
            placed.stage_times[stage, devices],
            placed.device_sets[devices],
            placed.speed_sets[devices],
            strict=True,
        )
        computed_s = max(pricing.in_program_s(_before_s(one), device, speed) for one, device, speed in times)
        taken = network.all_to_all(pricing.program.groups[group], 2 * moved_bytes)
        return computed_s + taken.seconds, 0.0, taken.link_s

    sets = placed.device_set_of_rank[columns.rank[rows]]
    return by_table(rank_s, columns.stage[rows], sets, columns.group[rows], columns.bytes[rows])


def _run_before(pricing: Pricing, stage: int, times: StageTimes, exchanges: Exchanges) -> float:
    """Return the seconds, below 0, that the exchange takes over from a step."""
    return 0.0 if owed_by(pricing.program) is None else -_before_s(times)


def _other_states(pricing: Pricing) -> Held:
    """Return the additional states of parameters that are no hidden matrices.

    The share of one rank may have such parameters alone. So it counts as many as it can hold.
    """
    plan, graph = pricing.plan, pricing.model.graph
    held = np.zeros(pricing.program.ranks, dtype=np.int64)
    element = plan.optimizer.other_states * STEPPED_BYTES[plan.precision]
    for index, stage in enumerate(plan.stages if element else ()):
        shape = pricing.placed.shape(index)
        parameters = stage_parameters(graph, stage.layers, shape)
        others = parameters - sum(matrix_parameters(graph.layers[layer], shape) for layer in stage.layers)
        own = min(others, -(-parameters // plan.sharers(index)))
        held[pricing.placed.ranks_of_stage[index].ravel()] += element * own
    return Held(held)


COSTS = (
    CostOf(kind="whole_matrices", hook=_exchange),
    AddedWork(kind="step", seconds=_run_before),
    ResidentBytes(what="further optimizer states", hook=_other_states),
)
