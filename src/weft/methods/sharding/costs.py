"""The costs of sharding: its collectives, their earliest starts, and the resident bytes of a rank."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weft.describe.synchronisation import DENSE, gather_wire_of, sent_share_of
from weft.methods.sharding.kinds import REDUCE
from weft.predict.cost.hooks import (
    CostHook,
    CostOf,
    Lead,
    LeadOf,
    Taken,
    TimeOf,
    gradient_pass_s,
    synchronising_hook,
    takes_nothing,
)
from weft.predict.cost.memory import (
    BUFFERS,
    STACKS,
    STATED_BUFFERS,
    ResidentStates,
    plan_states,
    resident_states,
    stage_parameters,
)
from weft.predict.cost.network import Network
from weft.predict.cost.pricing import Pricing, of_whole_passes
from weft.predict.cost.residency import Held, ResidentBytes
from weft.predict.cost.traffic import TrafficOf
from weft.program.arrays import Floats, Ints
from weft.program.kinds import MAKES_GRADIENTS, is_any_of


def _reduction(pricing: Pricing) -> TimeOf:
    """Return the collective of a reduction: with sharded optimizer states, a rank needs only its shard."""
    return Network.all_reduce if pricing.plan.sharding == "zero-0" else Network.reduce_scatter


def _casting(hook: CostHook, cast: Callable[[Ints], Ints]) -> CostHook:
    """Return the cost hook of a reduction with the casts of what a rank sends and of what it receives.

    A cast reads a gradient in its own precision and writes it in the other, or the reverse. `cast` returns
    the cast elements, as multiples of a rank's shard, from the number of shards.
    """

    def priced(pricing: Pricing, rows: Ints) -> Taken:
        taken, states, plan = hook(pricing, rows), plan_states(pricing.plan), pricing.plan
        if states.reduced == states.gradients:
            return taken
        shards = np.array([plan.sharers(stage) for stage in range(len(plan.stages))])
        shards_cast = cast(shards[pricing.program.columns.stage[rows]])
        passes = (1.0 + states.reduced / states.gradients) * shards_cast
        return taken._replace(occupancy=taken.occupancy + passes * gradient_pass_s(pricing, rows))

    return priced


def reduction_lead(pricing: Pricing, rows: Ints, occupancy: Floats, link_s: Floats) -> Lead:
    """Return the leads, in seconds: a reduction may start that early before its stage's last backward ends.

    Gradients are reduced layer by layer as they become ready, and layers count as equal. Of n layers, n - 1
    overlap the backward, unless they are reduced faster than they become ready. A reduction that shares links
    takes longer and hides as much more. It starts as early as if it met all others on its links, but the last
    layer's part always follows. A device that computes on its host starts no reduction meanwhile. Other
    methods than dense sums begin with a whole gradient.
    """
    if "reductions" in pricing.plan.blocking or pricing.plan.sync.name != DENSE:
        return Lead(np.zeros(len(rows)), np.zeros(len(rows)))
    columns, edges, links = pricing.program.columns, pricing.program.edges, pricing.placed.links
    made = is_any_of(columns.kind[edges.source], MAKES_GRADIENTS) & (columns.kind[edges.target] == REDUCE)
    made_s = np.zeros(len(columns))
    of_passes = of_whole_passes(pricing.program, occupancy)
    np.maximum.at(made_s, edges.target[made], of_passes[edges.source[made]])
    layers = np.array([len(stage.layers) for stage in pricing.plan.stages])[columns.stage[rows]]
    synchronous = pricing.model.network.places.synchronous[columns.rank[rows]]
    hidden = np.where(synchronous, 0.0, 1.0 - 1.0 / layers)
    group = columns.group[rows]
    each = link_s[rows] / links.flows_of_group[group]
    in_step = np.maximum(occupancy[rows], each * links.lanes_of_group[group])
    longest = np.maximum(in_step, each * links.users_of_group[group])
    lead = hidden * np.minimum(made_s[rows], longest)
    return Lead(lead, np.where(lead > 0.0, in_step / layers, 0.0))


def _resident(pricing: Pricing) -> ResidentStates:
    """Return the bytes of the states and buffers of a rank's stages, or of its shard of them."""
    plan, ranks = pricing.plan, pricing.program.ranks
    stages = (
        (held, stage_parameters(pricing.model.graph, stage.layers, shape), plan.reducers(index))
        for index, stage in enumerate(plan.stages)
        for held, shape in pricing.placed.holders(index)
    )
    stack, stated = STACKS[plan.stack], plan.buffers
    return resident_states(stages, ranks, plan_states(plan), plan.sharding, stack=stack, stated=stated)


def _states(pricing: Pricing) -> Held:
    held = {name: each for name, each in _resident(pricing)._asdict().items() if name not in BUFFERS}
    return Held(sum(held.values(), np.zeros_like(held["weights"])), parts=held)


def _buffers(pricing: Pricing) -> Held:
    held, plan = _resident(pricing), pricing.plan
    stack = STACKS[plan.stack]
    if not plan.has_like_replicas:
        held = held._replace(arriving_gradients=_arriving_shards(pricing))
    each = {name: getattr(held, name) for name in BUFFERS}
    source = stack.source if plan.buffers is None else STATED_BUFFERS
    return Held(held.arriving_gradients + held.sharding_buffers, stack.spread, source, each)


def _arriving_shards(pricing: Pricing) -> Ints:
    """Return the bytes of gradients that arrive at every rank, among unlike replicas; shape (ranks,).

    A rank of a narrower replica copies each of its shards out of its gradient first.
    """
    plan, graph = pricing.plan, pricing.model.graph
    found = np.zeros(pricing.program.ranks, dtype=np.int64)
    for index, stage in enumerate(plan.stages):
        shard = stage_parameters(graph, stage.layers, plan.shape_of_shards(index))
        for held, shape in pricing.placed.holders(index):
            rooms = 1 if shape.tensor_parallel == plan.tensor_degrees[index] else 2
            found[held] = np.maximum(found[held], rooms * shard * plan_states(plan).arriving)
    return found


_REDUCE = synchronising_hook(_reduction, share_of=sent_share_of)
_ACROSS = synchronising_hook(lambda pricing: Network.all_reduce)
COSTS = (
    CostOf(kind="reduce", hook=_casting(_REDUCE, lambda shards: shards + 1)),
    # Ranks with the same shard add it up once more.
    CostOf(kind="reduce_across", hook=_casting(_ACROSS, lambda shards: np.full_like(shards, 2))),
    CostOf(kind="gather", hook=synchronising_hook(lambda pricing: Network.all_gather, gather_wire_of)),
    CostOf(kind="free", hook=takes_nothing),
    LeadOf(kind="reduce", hook=reduction_lead),
    TrafficOf(kind="reduce", ways=lambda plan: 2 if plan.sharding == "zero-0" else 1, share=sent_share_of),
    TrafficOf(kind="reduce_across", ways=lambda plan: 2),
    TrafficOf(kind="gather", ways=lambda plan: 1, wire=gather_wire_of),
    ResidentBytes(what="states", hook=_states),
    ResidentBytes(what="buffers", hook=_buffers),
)
