"""The costs of micro-batch clipping: passes over the gradient, sums of numbers, and gradients that wait."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weft.methods.micro_batch_clipping.kinds import CLIP_KINDS, TAKE_GRADIENT, owed_by
from weft.predict.cost.hooks import CostOf, Taken, collective_hook, gradient_pass_s
from weft.predict.cost.memory import gradient_element_bytes, own_parameters, with_slack
from weft.predict.cost.network import Network
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import Held, LiveBytes, ResidentBytes
from weft.program.arrays import Floats, Ints
from weft.program.codes import codes
from weft.program.kinds import is_any_of

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
    seconds = np.array([pricing.placed.exchanges_of(*place).gradient_s for place in places])
    return np.where(columns.part[rows] < last[columns.rank[rows]], seconds, 0.0)


def _meeting(passes: float) -> Callable[[Pricing, Ints], Taken]:
    def hook(pricing: Pricing, rows: Ints) -> Taken:
        taken, takes = _ADDED_UP(pricing, rows), _first_takes(pricing)
        seconds = _of_norms(pricing, rows, takes, _whole_pass_s(pricing, takes))
        return taken._replace(occupancy=taken.occupancy + passes * seconds)

    return hook


def _of_norms(pricing: Pricing, rows: Ints, takes: Ints, amounts: Floats) -> Floats:
    """Return by row the sum over the stages that have its norm, of amounts by stage and rank of `takes`."""
    columns, owed = pricing.program.columns, owed_by(pricing.program)
    by_stage = owed is not None and owed.by_stage
    both = np.concatenate([takes, rows])
    _, place = np.unique(
        codes(columns.rank[both], columns.stage[both] if by_stage else 0 * both), return_inverse=True
    )
    sums: Floats = np.bincount(place[: len(takes)], amounts, place.max(initial=0) + 1).astype(np.float64)
    return sums[place[len(takes) :]]


def _first_takes(pricing: Pricing) -> Ints:
    """Return one row for each stage of a rank and step: the first that takes a gradient of it."""
    columns = pricing.program.columns
    found: Ints = np.flatnonzero((columns.kind == TAKE_GRADIENT) & (columns.part == 0))
    _, first = np.unique(codes(columns.rank[found], columns.stage[found]), return_index=True)
    return found[first]


def _whole_pass_s(pricing: Pricing, rows: Ints) -> Floats:
    """Return the seconds to read all of a stage's gradient, also where ranks step shards of it."""
    stages = pricing.program.columns.stage[rows]
    sharers = np.array([pricing.plan.sharers(stage) for stage in range(len(pricing.plan.stages))])
    seconds: Floats = gradient_pass_s(pricing, rows) * sharers[stages]
    return seconds


def _gradient_bytes(pricing: Pricing) -> Ints:
    """Return the bytes of one gradient of every stage on one of its ranks; shape (stages,)."""
    plan, graph = pricing.plan, pricing.model.graph
    counts = [
        own_parameters(graph, stage.layers, pricing.placed.shape(index))
        for index, stage in enumerate(plan.stages)
    ]
    return gradient_element_bytes(plan) * np.array(counts, dtype=np.int64)


def _sums(pricing: Pricing) -> Held:
    """Return the bytes of the sums of clipped gradients, one for each source of the data."""
    held, owed = np.zeros(pricing.program.ranks, dtype=np.int64), owed_by(pricing.program)
    if owed is not None:
        stages = _first_takes(pricing)
        columns = pricing.program.columns
        size = owed.sources * _gradient_bytes(pricing)
        np.add.at(held, columns.rank[stages], size[columns.stage[stages]])
    return Held(held)


def _waiting(pricing: Pricing) -> Ints:
    """Return the changes of bytes by gradients that are taken, and wait until their norm is known."""
    columns = pricing.program.columns
    change = np.zeros(len(columns), dtype=np.int64)
    if owed_by(pricing.program) is None:
        return change
    size = with_slack(_gradient_bytes(pricing))
    takes = np.flatnonzero(columns.kind == TAKE_GRADIENT)
    cuts = np.flatnonzero(is_any_of(columns.kind, CLIP_KINDS))
    change[takes] = size[columns.stage[takes]]
    first = _first_takes(pricing)
    freed = _of_norms(pricing, cuts, first, size[columns.stage[first]].astype(np.float64))
    change[cuts] = -freed.astype(np.int64)
    return change


COSTS = (
    CostOf(kind="take_gradient", hook=_take),
    CostOf(kind="clip_gradient", hook=_meeting(_CLIP_PASSES)),
    CostOf(kind="bound_gradient", hook=_meeting(_BOUND_PASSES)),
    CostOf(kind="clip_stage_gradient", hook=_meeting(_CLIP_PASSES)),
    CostOf(kind="bound_stage_gradient", hook=_meeting(_BOUND_PASSES)),
    ResidentBytes(what="sums of clipped gradients", hook=_sums),
    LiveBytes(what="gradients of clipped micro-batches", hook=_waiting),
)
