"""From a Program to its `Costs`: seconds and bytes of every instruction of a plan.

Each kind of instruction has a cost hook, keyed by the kind's name; whoever registers a kind registers its
hook. Hooks see all rows of their kind at once and answer by table, not by row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.describe.cluster import Cluster
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import SHARED, Plan
from weft.errors import InputError, Violation
from weft.predict.corrections import Correction
from weft.predict.cost.compute import StageTimes
from weft.predict.cost.cost_model import CostModel
from weft.predict.cost.exchanges import Exchanges
from weft.predict.cost.network import CollectiveTime, Network
from weft.predict.cost.placed_plan import PlacedPlan
from weft.predict.cost.places import Spread
from weft.predict.cost.pricing import Pricing, reduction_lead
from weft.predict.cost.residency import base_bytes, live_bytes
from weft.predict.costs import Costs
from weft.predict.profile import LayerProfile, MachineMeasurement
from weft.program.codes import distinct_rows
from weft.program.kinds import KINDS
from weft.program.program import Ints, Program

Seconds = npt.NDArray[np.float64]

TICK_S = 1e-9


@dataclass(frozen=True, kw_only=True)
class Priced:
    """Costs, and how far to trust them.

    `twins` are the ranks that each rank with instructions stands for, itself among them.
    `low_scale` and `high_scale` times a predicted time are the ends of its 90 % interval; `source` names
    what the times come from; `shared` is the part of the errors' variance that all plans share.
    """

    costs: Costs
    twins: Mapping[int, Ints]
    low_scale: float
    high_scale: float
    source: str
    shared: float = SHARED


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


def price(
    program: Program,
    plan: Plan,
    graph: LayerGraph,
    cluster: Cluster,
    *,
    machine: MachineMeasurement | None = None,
    profile: LayerProfile | None = None,
    correction: Correction | None = None,
) -> Priced:
    """Cost every instruction of a plan's program; `machine` and `profile` refine what they cover.

    `correction` multiplies the times, and says how sure they are then.

    Raises:
        InputError: when the cluster has fewer ranks than the plan, a kind has no cost hook, or compute times
            cannot be had (see `ComputeModel.stage_times`).
    """
    return price_with(
        CostModel(graph=graph, cluster=cluster, machine=machine, profile=profile, correction=correction),
        program,
        plan,
    )


def price_with(model: CostModel, program: Program, plan: Plan) -> Priced:
    """As `price`, with a cost model that may have priced other plans.

    Raises:
        InputError: as `price` does.
    """
    return price_placed(PlacedPlan(program=program, plan=plan, model=model), program)


def price_placed(placed: PlacedPlan, program: Program) -> Priced:
    """As `price`, for a program of a plan that may have priced others, of other lengths.

    Raises:
        InputError: as `price` does.
    """
    cluster = placed.model.cluster
    if program.ranks > cluster.ranks:
        raise InputError(
            Violation("plan", f"uses {program.ranks} ranks, but {cluster.name} has {cluster.ranks}")
        )
    pricing = Pricing(program=program, placed=placed)
    occupancy = np.zeros(len(program))
    latency = np.zeros(len(program))
    link_s = np.zeros(len(program))
    for code in np.unique(program.columns.kind).tolist():
        rows = np.flatnonzero(program.columns.kind == code)
        occupancy[rows], latency[rows], link_s[rows] = _hook(KINDS[code].name)(pricing, rows)
    synchronous = pricing.model.network.places.synchronous[: program.ranks]
    lead, rest = reduction_lead(pricing, occupancy, link_s, synchronous)
    times = [time for place in pricing.placed.stage_times.values() for time in place]
    half_width = max(time.half_width for time in times)
    low_scale, high_scale = 1.0 - half_width, 1.0 + half_width
    source, shared = ", ".join(sorted({time.source for time in times})), SHARED
    if (correction := placed.model.correction) is not None:
        low_scale, high_scale = correction.interval(low_scale, high_scale)
        source, shared = f"{source}, {correction.in_words()}", correction.shared
    return Priced(
        costs=Costs(
            occupancy=_ticks(occupancy),
            latency=_ticks(latency),
            tick_s=TICK_S,
            synchronous=synchronous,
            live_bytes=live_bytes(pricing),
            base_bytes=base_bytes(pricing),
            links=pricing.links,
            group_links=pricing.placed.links.group_links,
            demand=np.divide(link_s, occupancy, out=np.ones(len(program)), where=occupancy > 0.0),
            lead=_ticks(lead),
            rest=_ticks(rest),
            compute_slowdown=pricing.placed.slowdowns[0],
            communication_slowdown=pricing.placed.slowdowns[1],
        ),
        twins=pricing.placed.twins,
        low_scale=low_scale,
        high_scale=high_scale,
        source=source,
        shared=shared,
    )


def _hook(kind: str) -> CostHook:
    if kind not in _HOOKS:
        raise InputError(Violation("program", f"kind {kind!r} has no cost hook; register one"))
    return _HOOKS[kind]


def _ticks(seconds: Seconds) -> Ints:
    return np.rint(seconds / TICK_S).astype(np.int64)


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
