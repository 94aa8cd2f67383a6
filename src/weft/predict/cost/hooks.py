"""What an instruction of each kind costs.

Each kind of instruction has a cost hook, keyed by the kind's name; whoever registers a kind registers its
hook. Hooks see all rows of their kind at once and answer by table, not by row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weft.describe.plan import Plan
from weft.errors import InputError, Violation
from weft.predict.cost.compute import StageTimes
from weft.predict.cost.exchanges import Exchanges
from weft.predict.cost.network import CollectiveTime, Network
from weft.predict.cost.places import Spread
from weft.predict.cost.pricing import Pricing, Seconds
from weft.program.codes import distinct_rows
from weft.program.program import Ints

CostHook = Callable[[Pricing, Ints], tuple[Seconds, Seconds, Seconds]]
"""(occupancy, latency, link time) in seconds of the rows given; shape (rows,).

The link time is how long what a row moves keeps a link between nodes busy; it matters where there is one.
"""

_HOOKS: dict[str, CostHook] = {}


def register_cost_hook(kind: str, hook: CostHook) -> None:
    """Give a kind of instruction its cost.

    Raises:
        InputError: when it has one already.
    """
    if kind in _HOOKS:
        raise InputError(Violation("cost hooks", f"kind {kind!r} already has one"))
    _HOOKS[kind] = hook


def hook_of(kind: str) -> CostHook:
    """The cost hook of a kind.

    Raises:
        InputError: when it has none.
    """
    if kind not in _HOOKS:
        raise InputError(Violation("program", f"kind {kind!r} has no cost hook; register one"))
    return _HOOKS[kind]


def _by_table(
    seconds_of: Callable[..., tuple[float, float, float]], *keys: Ints
) -> tuple[Seconds, Seconds, Seconds]:
    """Evaluate each distinct combination of `keys`, columns of one length, once."""
    first, which = distinct_rows(*keys)
    rows = zip(*(key[first].tolist() for key in keys), strict=True)
    table = np.array([seconds_of(*row) for row in rows]).reshape(-1, 3)
    return table[which, 0], table[which, 1], table[which, 2]


def _compute_hook(
    seconds_of: Callable[[Pricing, StageTimes], float],
    exchanged: Callable[[Exchanges], float] = lambda exchanges: 0.0,
    *,
    recomputes: bool = False,
) -> CostHook:
    """A stage's time, the executor's own time, and what the ranks of its replica exchange, if several.

    `recomputes` says whether it begins with another forward pass where its stage's activations are not kept.
    """

    def hook(pricing: Pricing, rows: Ints) -> tuple[Seconds, Seconds, Seconds]:
        columns = pricing.program.columns
        sets = pricing.placed.device_set_of_rank[columns.rank[rows]]

        def place_s(stage: int, replica: int, devices: int, completes: int) -> tuple[float, float, float]:
            seconds = max(
                pricing.in_program_s(seconds_of(pricing, times), device, speed)
                for times, device, speed in zip(
                    pricing.placed.stage_times[stage, devices],
                    pricing.placed.device_sets[devices],
                    pricing.placed.speed_sets[devices],
                    strict=True,
                )
            )
            exchanges = pricing.placed.exchanges_of(stage, replica)
            seconds += exchanged(exchanges)
            if recomputes and pricing.plan.stages[stage].recompute != "none":
                seconds += exchanges.again_s
            if completes:
                seconds += exchanges.gradient_s
            return seconds, 0.0, 0.0

        completes = pricing.completes_gradient[rows]
        return _by_table(place_s, columns.stage[rows], columns.replica[rows], sets, completes)

    return hook


def _send(pricing: Pricing, rows: Ints) -> tuple[Seconds, Seconds, Seconds]:
    columns = pricing.program.columns

    def pair_s(rank: int, peer: int, moved_bytes: int) -> tuple[float, float, float]:
        occupancy, latency = pricing.placed.links.message_s(rank, peer, moved_bytes)
        return occupancy, latency, occupancy

    return _by_table(pair_s, columns.rank[rows], columns.peer[rows], columns.bytes[rows])


_TimeOf = Callable[[Network, Spread, int], CollectiveTime]


def _collective_hook(time_of: Callable[[Plan], _TimeOf]) -> CostHook:
    def hook(pricing: Pricing, rows: Ints) -> tuple[Seconds, Seconds, Seconds]:
        columns = pricing.program.columns
        alone = time_of(pricing.plan)

        def group_s(group: int, moved_bytes: int) -> tuple[float, float, float]:
            spreads = pricing.placed.links.spreads_of_group[group]
            taken = max(alone(pricing.model.network, spread, moved_bytes) for spread in spreads)
            # Flows in step take as long as all their bytes keep the link busy, if that is longer than one's
            # latencies and bytes: the others' bytes move while one waits.
            link_s = taken.link_s * int(pricing.placed.links.flows_of_group[group])
            return max(taken.seconds, link_s), 0.0, link_s

        return _by_table(group_s, columns.group[rows], columns.bytes[rows])

    return hook


def _reduction(plan: Plan) -> _TimeOf:
    """Where optimizer states are shared out each rank only needs its share of the sum."""
    return Network.all_reduce if plan.sharding == "zero-0" else Network.reduce_scatter


def _norm(pricing: Pricing, rows: Ints) -> tuple[Seconds, Seconds, Seconds]:
    """A rank reads the gradients that it answers for, of all its stages; then all exchange one number."""
    columns, groups = pricing.program.columns, pricing.program.groups

    def rank_s(rank: int, group: int, moved_bytes: int) -> tuple[float, float, float]:
        taken = pricing.model.network.all_reduce(groups[group], moved_bytes)
        return pricing.placed.read_gradients_s(rank) + taken.seconds, 0.0, taken.link_s

    return _by_table(rank_s, columns.rank[rows], columns.group[rows], columns.bytes[rows])


def _step_s(pricing: Pricing, times: StageTimes) -> float:
    """Where the norm is taken, as if every step were clipped: gradients are read and written once more."""
    return times.update_s + (2.0 * times.read_gradients_s if pricing.plan.gradient_norm else 0.0)


def _nothing(pricing: Pricing, rows: Ints) -> tuple[Seconds, Seconds, Seconds]:
    return np.zeros(len(rows)), np.zeros(len(rows)), np.zeros(len(rows))


register_cost_hook(
    "forward", _compute_hook(lambda _, times: times.forward_s, lambda exchanges: exchanges.forward_s)
)
register_cost_hook(
    "backward",
    _compute_hook(
        lambda _, times: times.backward_input_s + times.backward_weight_s,
        lambda exchanges: exchanges.backward_s,
        recomputes=True,
    ),
)
register_cost_hook(
    "backward_input",
    _compute_hook(
        lambda _, times: times.backward_input_s, lambda exchanges: exchanges.backward_s, recomputes=True
    ),
)
# The weight part of a micro-batch's backward pass needs nothing from other ranks, nor does the optimizer.
register_cost_hook("backward_weight", _compute_hook(lambda _, times: times.backward_weight_s))
register_cost_hook("step", _compute_hook(_step_s))
register_cost_hook("send_activation", _send)
register_cost_hook("send_gradient", _send)
# A message takes its time on the sender's side.
register_cost_hook("receive_activation", _nothing)
register_cost_hook("receive_gradient", _nothing)
register_cost_hook("reduce", _collective_hook(_reduction))
# Every holder of a tied weight steps all of it.
register_cost_hook("reduce_tied", _collective_hook(lambda plan: Network.all_reduce))
# Of islands all add up what they share out, once more.
register_cost_hook("reduce_across", _collective_hook(lambda plan: Network.all_reduce))
register_cost_hook("gather", _collective_hook(lambda plan: Network.all_gather))
register_cost_hook("free", _nothing)
register_cost_hook("norm", _norm)
