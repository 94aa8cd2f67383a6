"""The costs of evaluation in bubbles: forward passes, messages, and a copy of the weights of each stage."""

from __future__ import annotations

import numpy as np

from weft.describe.amount import Amount
from weft.describe.layer import PassWork
from weft.methods.bubble_filling.step_works import WorksInSteps
from weft.methods.evaluate.sizes import NAME
from weft.predict.cost.hooks import CostOf, Taken, by_table, computation, message_cost, takes_nothing
from weft.predict.cost.memory import stage_parameters
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import Held, ResidentBytes
from weft.program.arrays import Ints


def _parameters(pricing: Pricing, stage: int) -> int:
    layers = pricing.plan.stages[stage].layers
    return stage_parameters(pricing.model.graph, layers, pricing.placed.shape(stage))


def _copy(pricing: Pricing, rows: Ints) -> Taken:
    """Return the time in which a device reads and writes all weights of a stage once."""
    placed, columns, plan = pricing.placed, pricing.program.columns, pricing.plan

    def place_s(stage: int, devices: int) -> tuple[float, float, float]:
        work = PassWork(memory=Amount.of(2 * _parameters(pricing, stage)), kernels=1)
        each = zip(placed.device_sets[devices], placed.speed_sets[devices], strict=True)
        return (
            max(
                pricing.in_program_s(
                    pricing.model.compute.work_s(work, placed.shape(stage), plan.precision, device),
                    device,
                    speed,
                )
                for device, speed in each
            ),
            0.0,
            0.0,
        )

    sets = placed.device_set_of_rank[columns.rank[rows]]
    taken = by_table(place_s, columns.stage[rows], sets)
    used = [
        times
        for stage, one in zip(columns.stage[rows].tolist(), sets.tolist(), strict=True)
        for times in placed.stage_times[stage, one]
    ]
    return taken._replace(
        spread=max(times.half_width for times in used), sources=frozenset(times.source for times in used)
    )


def _held(pricing: Pricing) -> Held:
    """Return the bytes of one copy of the weights of each stage."""
    held = np.zeros(pricing.program.ranks, dtype=np.int64)
    if isinstance(pricing.program.obligations.methods.get(NAME), WorksInSteps):
        for stage in range(len(pricing.plan.stages)):
            size = pricing.plan.element_bytes * _parameters(pricing, stage)
            held[pricing.placed.ranks_of_stage[stage].ravel()] += size
    return Held(held)


COSTS = (
    CostOf(kind="copy_weights", hook=_copy),
    computation("held_out_forward", lambda times: times.forward_s, lambda exchanges: exchanges.forward_s),
    CostOf(kind="send_held_out", hook=message_cost),
    CostOf(kind="receive_held_out", hook=takes_nothing),
    ResidentBytes(what="weights that are evaluated", hook=_held),
)
