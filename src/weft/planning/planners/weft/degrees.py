"""Plans whose stages have tensor degrees of their own: every stage on devices of one group of nodes.

Nodes of four devices and nodes of two have no mesh of tensor degree four that uses all devices. Slow
devices may need more ranks for a stage than fast ones. So each group of nodes is cut into equal stages. All
stages have equally many replicas. The devices of a stage, divided by these, are its tensor degree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from math import gcd

import numpy as np

from weft.describe.layout import DENSE, Layout
from weft.describe.plan import Choice, Plan, Recompute, Replica, Sharding, Stage
from weft.describe.plan_file import check_plan
from weft.moves.layout import build_plan
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.graphpipe.plans import DECIDED
from weft.planning.planners.weft.estimates import LIGHT
from weft.planning.planners.weft.mixed import choices
from weft.planning.planners.weft.placement import placements_of
from weft.planning.planners.weft.stages import Dealt, Way, deal
from weft.planning.planners.weft.uneven import SCHEDULE, UnevenSpace
from weft.planning.problem import Problem
from weft.program.arrays import Ints
from weft.program.schedules.ring import divisors

# The order with split backward passes.
SPLIT = "zb-h1"
# Most stages of one group of nodes, and orders of the groups.
MOST_STAGES, _ORDERS = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreePlan:
    """A plan with unlike tensor degrees, and the estimate of its step."""

    plan: Plan
    estimate_s: float


@dataclass(frozen=True, slots=True)
class _StageRow:
    """Stages in a row: for each the ranks of its replicas, shape (replicas, tensor ranks)."""

    ranks: tuple[Ints, ...]

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(held.shape[1] for held in self.ranks)

    @property
    def replicas(self) -> int:
        return len(self.ranks[0])


class DegreeSpace:
    """The plans of one problem with unlike tensor degrees."""

    def __init__(self, problem: Problem, bounds: Bounds) -> None:
        self._problem, self._bounds = problem, bounds
        self._uneven = UnevenSpace(problem, bounds)
        self._words = words_of(problem)

    def search(self) -> list[DegreePlan]:
        """Return the plans that fit by their bounds, least estimates first: one for each row of stages.

        Raises:
            InputError: when a profile was not measured at a micro-batch size or tensor degree.
        """
        best = (self._best_of(row) for row in self._rows())
        return sorted((one for one in best if one is not None), key=lambda one: one.estimate_s)

    def _rows(self) -> Iterator[_StageRow]:
        """Yield stages in a row with unlike tensor degrees, which use every device."""
        problem, cluster = self._problem, self._problem.job.cluster
        pins, graph = problem.pins, problem.job.graph
        open_axes = pins.tp is None and {pins.cp, pins.ep, pins.loops} <= {None, 1}
        asked = pins.schedule in (None, SCHEDULE) and (problem.sync or DENSE) == DENSE
        if not (open_axes and asked and graph.is_chain and len(cluster.groups) > 1):
            return
        starts = [0, *accumulate(group.count * group.devices for group in cluster.groups)]
        orders = dict.fromkeys(placement.groups for placement in placements_of(cluster, _ORDERS))
        for order in orders:
            held = [range(starts[group], starts[group + 1]) for group in order]
            cuts = [[one for one in divisors(len(ranks)) if one <= MOST_STAGES] for ranks in held]
            for stages in product(*cuts):
                if sum(stages) > len(graph.layers) or pins.pp not in (None, sum(stages)):
                    continue
                widths = [len(ranks) // count for ranks, count in zip(held, stages, strict=True)]
                on_node = [cluster.groups[group].devices for group in order]
                for replicas in divisors(gcd(*widths)):
                    degrees = [width // replicas for width in widths]
                    if pins.dp in (None, replicas) and self._possible(degrees, on_node):
                        yield _row(held, stages, replicas)

    def _possible(self, degrees: Sequence[int], on_node: Sequence[int]) -> bool:
        """Return True for unlike degrees on whole nodes or parts of them that divide the layers."""
        distinct = sorted(set(degrees))
        return (
            len(distinct) > 1
            and not any(more % fewer for fewer, more in pairwise(distinct))
            and not any(devices % degree for degree, devices in zip(degrees, on_node, strict=True))
            and all(self._problem.job.graph.refuse_tensor(degree) is None for degree in distinct)
        )

    def _best_of(self, row: _StageRow) -> DegreePlan | None:
        """Return the plan of a row with the least estimate; None if none fits."""
        problem = self._problem
        found: tuple[float, Layout, Dealt] | None = None
        for layout in decisions(problem, row.replicas, LIGHT):
            one = self._dealt(row, layout)
            if one is not None and (found is None or one[0] < found[0]):
                found = one[0], layout, one[1]
        if found is None:
            return None
        estimate_s, layout, dealt = found
        mesh = {"pp": sum(row.degrees), "dp": row.replicas}
        plan = plan_of(problem, layout, dealt, [held.tolist() for held in row.ranks], self._words, mesh)
        return DegreePlan(plan=plan, estimate_s=estimate_s)

    def _dealt(self, row: _StageRow, layout: Layout) -> tuple[float, Dealt] | None:
        """Return cuts of the layers for a row, and the estimate of the step; None if nothing fits."""
        bounds, uneven = self._bounds, self._uneven
        wide = [replace(layout, pp=len(row.ranks), tp=degree) for degree in row.degrees]
        paces = [uneven.slowest(one, held[None])[0] for one, held in zip(wide, row.ranks, strict=True)]
        # For `deal`, devices of one pace and unlike degrees have unlike paces.
        kinds: dict[tuple[int, int], int] = {}
        pace = np.array(
            [
                [kinds.setdefault((one.tp, pace), len(kinds)) for pace in own.tolist()]
                for one, own in zip(wide, paces, strict=True)
            ]
        )
        ways = []
        for word in self._words:
            of_degree = {one.tp: one.recomputing(word) for one in wide}
            times_s = [uneven.seconds_at(of_degree[degree], pace) for degree, pace in kinds]
            ways.append(Way(times_s, [bounds.layer_bytes(of_degree[degree]) for degree, _ in kinds]))
        room = np.array([uneven.room_bytes(held.reshape(1, -1))[0] for held in row.ranks])
        micro_batches = self._problem.job.global_batch // layout.micro_batch_size
        stages, share = len(row.ranks), micro_batches // row.replicas
        in_flight = np.minimum(stages - np.arange(stages), share).astype(np.float64)
        found = deal(ways, pace, np.arange(stages), room, in_flight, micro_batches, uneven=False)
        if found is None:
            return None
        return found.pipeline_s + self._reduced_s(row, layout, found), found

    def _reduced_s(self, row: _StageRow, layout: Layout, found: Dealt) -> float:
        """Return the seconds in which the replicas of the slowest stage reduce its gradient."""
        if row.replicas == 1:
            return 0.0
        network, ends = self._problem.cost_model.network, [0, *accumulate(found.layers_per_stage)]
        most_s = 0.0
        for index, held in enumerate(row.ranks):
            gradients, _ = self._bounds.exchanged_bytes(replace(layout, tp=held.shape[1]))
            size = round(float(gradients[ends[index] : ends[index + 1]].sum()))
            most_s = max(most_s, network.all_reduce_s(held[:, 0].tolist(), size))
        return most_s


def decisions(
    problem: Problem, replicas: int, shardings: Sequence[Sharding], *, uneven: bool = False
) -> Iterator[Layout]:
    """Yield the decisions of plans besides stages, as layouts of one stage on one tensor rank.

    Replicas share the batch equally, or in any way (`uneven`), in whole micro-batches.
    """
    pins, batch = problem.pins, problem.job.global_batch
    unit = 1 if uneven else replicas
    sizes = [2**turn for turn in range((batch // replicas).bit_length())]
    for size in sizes if pins.micro_batch_size is None else [pins.micro_batch_size]:
        for sharding in shardings if pins.sharding is None else (pins.sharding,):
            fits = batch >= size * replicas and batch % (size * unit) == 0
            if not fits or (sharding != "zero-0" and replicas == 1):
                continue
            yield Layout(
                pp=1,
                dp=replicas,
                tp=1,
                loops=1,
                micro_batch_size=size,
                schedule=SCHEDULE,
                sync=DENSE,
                sharding=sharding,
                **pins.besides(DECIDED | {"cp", "ep"}),
            )


def plan_of(
    problem: Problem,
    layout: Layout,
    dealt: Dealt,
    ranks: Sequence[Sequence[Sequence[int]]],
    words: Sequence[Recompute],
    mesh: Mapping[str, int],
) -> Plan:
    """Return the plan of a layout's decisions with dealt stages on these ranks, by stage and replica."""
    shares = dealt.micro_batches if len(set(dealt.micro_batches)) > 1 else None
    layout = replace(layout, micro_batches_per_replica=shares)
    plan = build_plan(problem.job, layout, [1.0] * len(problem.job.graph.layers))
    ends = [0, *accumulate(dealt.layers_per_stage)]
    stages = tuple(
        Stage(
            layers=tuple(range(ends[index], ends[index + 1])),
            replicas=tuple(
                Replica(ranks=tuple(own), micro_batches=share)
                for own, share in zip(held, dealt.micro_batches, strict=True)
            ),
            recompute=words[dealt.ways[index]],
        )
        for index, held in enumerate(ranks)
    )
    return plan.model_copy(update={"stages": stages, "mesh": {**plan.mesh, **mesh}})


def words_of(problem: Problem) -> tuple[Recompute, ...]:
    """Return the words of recomputation for each stage: the choices, or the pinned one."""
    return choices(problem) or (_pinned_word(problem),)


def in_orders(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Yield a plan in its order of micro-batches, and in one with split backward passes, if the job may."""
    job, splits = problem.job, problem.pins.schedule is None and len(plan.stages) > 1
    names = (SCHEDULE, SPLIT) if splits else (SCHEDULE,)
    for name in names:
        ordered = plan.model_copy(update={"schedule": Choice(name=name)})
        if not check_plan(ordered, job.graph, job.cluster):
            yield ordered


def _row(held: Sequence[range], stages: Sequence[int], replicas: int) -> _StageRow:
    """Return equal stages on the ranks of each group of nodes, replicas on neighbouring ranks."""
    return _StageRow(
        tuple(
            part.reshape(replicas, -1)
            for ranks, count in zip(held, stages, strict=True)
            for part in np.array(ranks, dtype=np.int64).reshape(count, -1)
        )
    )


def _pinned_word(problem: Problem) -> Recompute:
    """Return the pinned recomputation of all stages; none where it is open or stated for each stage."""
    pinned = problem.pins.recompute
    return pinned if isinstance(pinned, str) else "none"
