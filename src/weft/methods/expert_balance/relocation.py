"""`Relocation`: experts that change ranks, with the seconds that it saves and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.methods.expert_balance.imbalance import step_with
from weft.methods.expert_balance.places import Swap, busiest, swap, swaps
from weft.methods.expert_balance.program import mixtures
from weft.planning.planned_job import PlannedJob
from weft.predict.cost.memory import STEPPED_BYTES
from weft.predict.cost.network import Network
from weft.program.arrays import Floats, Ints


@dataclass(frozen=True, kw_only=True)
class Relocation:
    """Exchanges of experts between ranks, by the place of the mixture among all.

    Attributes:
        step_s: predicted seconds of a step with the experts where they are.
        after_s: those with the experts where they go.
        move_s: predicted seconds of the exchange.
        moved_bytes: bytes that leave the ranks of one replica, of weights and of optimizer states.
        busiest, busiest_after: tokens of the busiest rank over the mean, the mean of all mixtures.
    """

    swaps: Mapping[int, Sequence[Swap]]
    step_s: float
    after_s: float
    move_s: float
    moved_bytes: int
    busiest: float
    busiest_after: float

    @property
    def saved_s(self) -> float:
        """The predicted seconds that each step becomes shorter."""
        return self.step_s - self.after_s

    def pays(self, steps: int) -> bool:
        """Return True if so many steps save more than the exchange takes."""
        return steps * self.saved_s > self.move_s


def relocation(planned: PlannedJob, loads: Floats, places: Ints) -> Relocation | None:
    """Return the exchanges that make the ranks' tokens more equal, with their price; None without any.

    Args:
        loads: tokens of each expert in some steps, (mixtures, experts).
        places: the expert of each slot, (mixtures, ranks, slots).
    """
    layers, after = mixtures(planned.problem.job.graph), places.copy()
    found: dict[int, list[Swap]] = {}
    for mixture, (own, now) in enumerate(zip(loads, after, strict=True)):
        if exchanges := swaps(own, now):
            found[mixture] = exchanges
            for one in exchanges:
                swap(now, one)
    if not found:
        return None
    factors = [[busiest(own, now) for own, now in zip(loads, each, strict=True)] for each in (places, after)]
    step_s, after_s = (step_with(planned, dict(zip(layers, each, strict=True))) for each in factors)
    moved_bytes, move_s = _exchange(planned, found)
    return Relocation(
        swaps=found,
        step_s=step_s,
        after_s=after_s,
        move_s=move_s,
        moved_bytes=moved_bytes,
        busiest=float(np.mean(factors[0])),
        busiest_after=float(np.mean(factors[1])),
    )


def _exchange(planned: PlannedJob, found: Mapping[int, Sequence[Swap]]) -> tuple[int, float]:
    """Return (bytes, seconds) of exchanges; stages exchange at once, a stage one pair after the other.

    Replicas that share out the states of a stage each exchange their part of an expert.
    """
    graph, plan = planned.problem.job.graph, planned.plan
    network: Network = planned.problem.cost_model.network
    layers = mixtures(graph)
    stage_of = {layer: index for index, stage in enumerate(plan.stages) for layer in stage.layers}
    moved_bytes, seconds = 0, [0.0] * len(plan.stages)
    for mixture, exchanges in found.items():
        stage = stage_of[layers[mixture]]
        # Tensor ranks exchange their parts of an expert at the same time.
        first, *others = plan.grid(stage).expert_groups(plan.stages[stage].replicas[0].ranks)
        size = expert_bytes(graph, plan, layers[mixture])
        for one in exchanges:
            moved_bytes += 2 * size * (1 + len(others))
            pair = first[one.rank], first[one.other]
            seconds[stage] += sum(network.message_s(*pair, size // plan.sharers(stage)))
    return moved_bytes, max(seconds)


def expert_bytes(graph: LayerGraph, plan: Plan, layer: int) -> int:
    """Return the bytes of one tensor rank's part of an expert's weights and states."""
    shape = replace(plan.shape(0), expert_parallel=1)
    whole, one = (
        graph.layers[layer].parameters(replace(shape, expert_parallel=ranks)) for ranks in (1, graph.experts)
    )
    stepped = STEPPED_BYTES[plan.precision]
    parameters = (whole - one) / (graph.experts - 1)
    return round(parameters * (stepped + plan.optimizer.kept_bytes(stepped)))
