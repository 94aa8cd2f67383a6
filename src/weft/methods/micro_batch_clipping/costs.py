"""The costs of micro-batch clipping: passes over the gradient, sums of numbers, and gradients that wait."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weft.methods.micro_batch_clipping.kinds import owed_by
from weft.predict.cost.hooks import CostOf, Taken, collective_hook, gradient_pass_s
from weft.predict.cost.memory import gradient_element_bytes, own_parameters
from weft.predict.cost.network import Network
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import Held, ResidentBytes
from weft.program.arrays import Floats, Ints

# Passes over a stage's gradient: to copy, clear and square it; to add it to the sum; to put the sum back.
_TAKE_PASSES, _CLIP_PASSES, _BOUND_PASSES = 4.0, 3.0, 3.0

_ADDED_UP = collective_hook(lambda pricing: Network.all_reduce)


def _take(pricing: Pricing, rows: Ints) -> Taken:
    seconds = _TAKE_PASSES * _whole_pass_s(pricing, rows) + _sums_s(pricing, rows)
    return Taken(seconds, np.zeros_like(seconds), np.zeros_like(seconds))


def _sums_s(pricing: Pricing, rows: Ints) -> Floats:
    """Return the seconds in which a replica's ranks add up their parts of a gradient.

    The last backward pass of a step does so for the last clipped micro-batch.
    """
    columns = pricing.program.columns
    last = np.zeros(pricing.program.ranks, dtype=np.int64)
    np.maximum.at(last, columns.rank[rows], columns.part[rows])
    places = zip(columns.stage[rows].tolist(), columns.replica[rows].tolist(), strict=True)
    seconds = np.array([pricing.exchanges_of(*place).gradient_s for place in places])
    return np.where(columns.part[rows] < last[columns.rank[rows]], seconds, 0.0)


def _meeting(passes: float) -> Callable[[Pricing, Ints], Taken]:
    def hook(pricing: Pricing, rows: Ints) -> Taken:
        taken = _ADDED_UP(pricing, rows)
        return taken._replace(occupancy=taken.occupancy + passes * _whole_pass_s(pricing, rows))

    return hook


def _whole_pass_s(pricing: Pricing, rows: Ints) -> Floats:
    """Return the seconds to read all of a stage's gradient, also where ranks step shards of it."""
    stages = pricing.program.columns.stage[rows]
    sharers = np.array([pricing.plan.sharers(stage) for stage in range(len(pricing.plan.stages))])
    seconds: Floats = gradient_pass_s(pricing, rows) * sharers[stages]
    return seconds


def _waiting(pricing: Pricing) -> Held:
    """Return the bytes of the sums, and of the gradients whose norm the first stage completes later."""
    plan, owed = pricing.plan, owed_by(pricing.program)
    held = np.zeros(pricing.program.ranks, dtype=np.int64)
    if owed is None:
        return Held(held)
    most = max(one.micro_batches for one in plan.stages[0].replicas) // owed.together
    for index, stage in enumerate(plan.stages):
        count = own_parameters(pricing.model.graph, stage.layers, pricing.placed.shape(index))
        copies = owed.sources + min(most, 1 + index)
        held[pricing.placed.ranks_of_stage[index]] += copies * gradient_element_bytes(plan) * count
    return Held(held)


COSTS = (
    CostOf(kind="take_gradient", hook=_take),
    CostOf(kind="clip_gradient", hook=_meeting(_CLIP_PASSES)),
    CostOf(kind="bound_gradient", hook=_meeting(_BOUND_PASSES)),
    ResidentBytes(what="gradients of clipped micro-batches", hook=_waiting),
)
