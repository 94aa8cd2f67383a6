"""From a Program to its `Costs`: seconds and bytes of every instruction of a plan.

Each kind of instruction has a cost hook, keyed by the kind's name; whoever registers a kind registers its
hook. Hooks see all rows of their kind at once and answer by table, not by row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.describe.cluster import Cluster
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.errors import InputError, Violation
from weft.predict.cost.compute import ComputeModel, StageTimes
from weft.predict.cost.network import Network
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import base_bytes, live_bytes
from weft.predict.costs import Costs
from weft.predict.profile import LayerProfile, MachineMeasurement
from weft.program.buffers import MAKES_GRADIENTS
from weft.program.codes import distinct_rows
from weft.program.kinds import KINDS, REDUCE
from weft.program.program import Ints, Program

Seconds = npt.NDArray[np.float64]

TICK_S = 1e-9


@dataclass(frozen=True, kw_only=True)
class Priced:
    """Costs, and how far to trust them.

    `low_scale` and `high_scale` times a predicted time are the ends of its 90 % interval; `source` names
    what the times come from.
    """

    costs: Costs
    low_scale: float
    high_scale: float
    source: str


CostHook = Callable[[Pricing, Ints], tuple[Seconds, Seconds]]
"""(occupancy, latency) in seconds of the rows given; shape (rows,)."""

_HOOKS: dict[str, CostHook] = {}


def register_cost_hook(kind: str, hook: CostHook) -> None:
    """Give a kind of instruction its cost.

    Raises:
        InputError: when it has one already.
    """
    if kind in _HOOKS:
        raise InputError(Violation("cost hooks", f"kind {kind!r} already has one"))
    _HOOKS[kind] = hook


def price(
    program: Program,
    plan: Plan,
    graph: LayerGraph,
    cluster: Cluster,
    *,
    machine: MachineMeasurement | None = None,
    profile: LayerProfile | None = None,
) -> Priced:
    """Cost every instruction of a plan's program; `machine` and `profile` refine what they cover.

    Raises:
        InputError: when the cluster has fewer ranks than the plan, a kind has no cost hook, or compute times
            cannot be had (see `ComputeModel.stage_times`).
    """
    if plan.ranks > cluster.ranks:
        raise InputError(
            Violation("plan", f"uses {plan.ranks} ranks, but {cluster.name} has {cluster.ranks}")
        )
    pricing = Pricing(
        program=program,
        plan=plan,
        graph=graph,
        cluster=cluster,
        compute=ComputeModel(machine=machine, profile=profile),
        network=Network(cluster=cluster, machine=machine),
    )
    occupancy = np.zeros(len(program))
    latency = np.zeros(len(program))
    for code in np.unique(program.columns.kind).tolist():
        rows = np.flatnonzero(program.columns.kind == code)
        occupancy[rows], latency[rows] = _hook(KINDS[code].name)(pricing, rows)
    synchronous = np.array([cluster.device_of(rank).synchronous for rank in range(program.ranks)])
    lead = _reduction_lead(pricing, occupancy, synchronous)
    times = [time for place in pricing.stage_times.values() for time in place]
    half_width = max(time.half_width for time in times)
    return Priced(
        costs=Costs(
            occupancy=_ticks(occupancy),
            latency=_ticks(latency),
            tick_s=TICK_S,
            synchronous=synchronous,
            live_bytes=live_bytes(pricing),
            base_bytes=base_bytes(pricing),
            links=pricing.links,
            lead=_ticks(lead),
            compute_slowdown=pricing.slowdowns[0],
            communication_slowdown=pricing.slowdowns[1],
        ),
        low_scale=1.0 - half_width,
        high_scale=1.0 + half_width,
        source=", ".join(sorted({time.source for time in times})),
    )


def _reduction_lead(pricing: Pricing, occupancy: Seconds, synchronous: npt.NDArray[np.bool_]) -> Seconds:
    """Seconds before the end of a stage's last backward at which its reduction may start, (instructions,).

    Gradients are reduced layer by layer as they become ready, and layers count as equal: of n layers all but
    one can be reduced beside the backward, unless they are reduced faster than they become ready. A device
    that computes on its host posts nothing meanwhile.
    """
    program = pricing.program
    columns, edges = program.columns, program.edges
    lead = np.zeros(len(program))
    if "reductions" in pricing.plan.blocking:
        return lead
    made = np.isin(columns.kind[edges.source], MAKES_GRADIENTS) & (columns.kind[edges.target] == REDUCE)
    np.maximum.at(lead, edges.target[made], occupancy[edges.source[made]])
    rows = np.flatnonzero(columns.kind == REDUCE)
    layers = np.array([len(stage.layers) for stage in pricing.plan.stages])[columns.stage[rows]]
    hidden = np.where(synchronous[columns.rank[rows]], 0.0, 1.0 - 1.0 / layers)
    lead[rows] = hidden * np.minimum(lead[rows], occupancy[rows])
    return lead


def _hook(kind: str) -> CostHook:
    if kind not in _HOOKS:
        raise InputError(Violation("program", f"kind {kind!r} has no cost hook; register one"))
    return _HOOKS[kind]


def _ticks(seconds: Seconds) -> Ints:
    return np.rint(seconds / TICK_S).astype(np.int64)


def _by_table(seconds_of: Callable[..., tuple[float, float]], *keys: Ints) -> tuple[Seconds, Seconds]:
    """Evaluate each distinct combination of `keys`, columns of one length, once."""
    first, which = distinct_rows(*keys)
    rows = zip(*(key[first].tolist() for key in keys), strict=True)
    table = np.array([seconds_of(*row) for row in rows]).reshape(-1, 2)
    return table[which, 0], table[which, 1]


def _compute_hook(
    seconds_of: Callable[[StageTimes], float], *, tensor_reduced: bool, recomputes: bool = False
) -> CostHook:
    """A stage's time, the executor's own time, and the all-reduces of tensor ranks where there are some.

    `recomputes` says whether it begins with another forward pass where its stage's activations are not kept.
    """

    def hook(pricing: Pricing, rows: Ints) -> tuple[Seconds, Seconds]:
        columns = pricing.program.columns
        sets = pricing.device_set_of_rank[columns.rank[rows]]

        def place_s(stage: int, replica: int, devices: int) -> tuple[float, float]:
            seconds = max(
                pricing.in_program_s(seconds_of(times), device, speed)
                for times, device, speed in zip(
                    pricing.stage_times[stage, devices],
                    pricing.device_sets[devices],
                    pricing.speed_sets[devices],
                    strict=True,
                )
            )
            if tensor_reduced:
                again = recomputes and pricing.plan.stages[stage].recompute == "full"
                seconds += (2 if again else 1) * pricing.tensor_s.get((stage, replica), 0.0)
            return seconds, 0.0

        return _by_table(place_s, columns.stage[rows], columns.replica[rows], sets)

    return hook


def _send(pricing: Pricing, rows: Ints) -> tuple[Seconds, Seconds]:
    columns = pricing.program.columns
    return _by_table(pricing.message_s, columns.rank[rows], columns.peer[rows], columns.bytes[rows])


_CollectiveTime = Callable[[Network, tuple[int, ...], int, int], float]


def _collective_hook(time_of: Callable[[Plan], _CollectiveTime]) -> CostHook:
    def hook(pricing: Pricing, rows: Ints) -> tuple[Seconds, Seconds]:
        columns, groups = pricing.program.columns, pricing.program.groups
        collective_s = time_of(pricing.plan)

        def group_s(group: int, moved_bytes: int) -> tuple[float, float]:
            sharing = int(pricing.reduce_sharing[group])
            return collective_s(pricing.network, groups[group], moved_bytes, sharing), 0.0

        return _by_table(group_s, columns.group[rows], columns.bytes[rows])

    return hook


def _reduction_s(plan: Plan) -> _CollectiveTime:
    """Where optimizer states are shared out each rank only needs its share of the sum."""
    return Network.all_reduce_s if plan.sharding == "zero-0" else Network.reduce_scatter_s


def _nothing(pricing: Pricing, rows: Ints) -> tuple[Seconds, Seconds]:
    return np.zeros(len(rows)), np.zeros(len(rows))


register_cost_hook("forward", _compute_hook(lambda times: times.forward_s, tensor_reduced=True))
register_cost_hook(
    "backward",
    _compute_hook(
        lambda times: times.backward_input_s + times.backward_weight_s, tensor_reduced=True, recomputes=True
    ),
)
register_cost_hook(
    "backward_input",
    _compute_hook(lambda times: times.backward_input_s, tensor_reduced=True, recomputes=True),
)
# The weight part of a backward pass needs nothing from the other tensor ranks, nor does the optimizer.
register_cost_hook(
    "backward_weight", _compute_hook(lambda times: times.backward_weight_s, tensor_reduced=False)
)
register_cost_hook("step", _compute_hook(lambda times: times.update_s, tensor_reduced=False))
register_cost_hook("send_activation", _send)
register_cost_hook("send_gradient", _send)
# A message takes its time on the sender's side.
register_cost_hook("receive_activation", _nothing)
register_cost_hook("receive_gradient", _nothing)
register_cost_hook("reduce", _collective_hook(_reduction_s))
register_cost_hook("gather", _collective_hook(lambda plan: Network.all_gather_s))
register_cost_hook("free", _nothing)
