"""The planners that place operators: `baechi`, and each way to place by its own name (SoCC 2020).

Operators are placed for one micro-batch, by their times on every device and the links between devices. Runs
of operators on a device become stages, and micro-batches flow through them in the order `placed`. With a
single micro-batch the plan is Baechi's own: all devices but a few wait. The simulator ranks the plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from weft.describe.layout import DENSE, Layout
from weft.describe.plan import Choice, Plan, Recompute, Replica, Stage
from weft.describe.units import format_seconds
from weft.errors import InputError, Violation
from weft.moves.layout import build_plan, refuse
from weft.planning.placement.bounds import earliest_task_first_bound_ticks, lower_bound_ticks
from weft.planning.placement.placers import get_placer
from weft.planning.placement.preparation import CoPlacement, prepared
from weft.planning.planners.baechi.inputs import TICKS_PER_S, PlacementInputs
from weft.planning.planners.baechi.segments import segments
from weft.planning.planners.base import Candidate, Ranking, Verdict
from weft.planning.planners.graphpipe.part_plans import StageOfLayers
from weft.planning.planners.graphpipe.plans import in_order, said_as_layout
from weft.planning.planners.graphpipe.questions import least_layout, require_partition, sizes_of
from weft.planning.planners.homogeneous import rank_key
from weft.planning.planners.simulated import judged, prepare
from weft.planning.problem import Problem
from weft.program.schedules.placed import Placed

# Both are tried: groups as the paper makes them, and smaller ones that leave branches apart.
CO_PLACEMENTS: tuple[CoPlacement, ...] = ("readers", "chains")


class _Placed(NamedTuple):
    """A placement of layers as stages.

    `parts` are the device and the layers of each stage. `reason` has the makespan of one micro-batch and its
    bounds. `estimate_s` is a step: one micro-batch, and the busiest device with all others.
    """

    estimate_s: float
    parts: Sequence[tuple[int, list[int]]]
    times: Sequence[int]
    size: int
    in_flight: int
    recompute: Recompute
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlanner:
    """A search over sizes of micro-batches, with one or several ways to place operators.

    Attributes:
        name: the name that users type.
        placers: names of `weft.planning.placement.placers.PLACERS`.
        finalists: placements to simulate, least estimates first.
    """

    name: str
    placers: tuple[str, ...]
    finalists: int = 12

    def space(self, problem: Problem) -> Iterator[Layout]:
        """Return the sizes of micro-batches; placements add the stages."""
        least = least_layout(problem, Placed.name)
        return (replace(least, micro_batch_size=size) for size in sizes_of(problem, 1))

    def search(self, problem: Problem) -> Ranking:
        """Place the layers for every size of micro-batches, and simulate the best placements.

        Raises:
            InputError: for pins, goals and methods that a placement does not know.
        """
        _require_placement(problem, self.name)
        least = least_layout(problem, Placed.name)
        if (reason := refuse(problem.job, least)) is not None:
            refused = Candidate(layout=least, verdict=Verdict.REFUSED, reason=reason)
            return Ranking(problem=problem, candidates=(refused,))
        prepare(problem)
        inputs = PlacementInputs(problem, tuple(sizes_of(problem, 1)))
        candidates: list[Candidate] = []
        for word in inputs.costs.recomputes(inputs.costs.sizes[0]):
            candidates += self._with_recomputation(replace(inputs, recompute=word))
            if any(one.verdict is Verdict.FITS for one in candidates):
                break
        return Ranking(problem=problem, candidates=tuple(sorted(candidates, key=rank_key(problem))))

    def _with_recomputation(self, inputs: PlacementInputs) -> list[Candidate]:
        """Return the best placements, simulated, and the reasons of ways that placed nothing."""
        found: list[_Placed] = []
        refused: dict[str, Candidate] = {}
        for size, in_flight in self._questions(inputs):
            for name in self.placers:
                for co_placement in CO_PLACEMENTS:
                    try:
                        found.append(_placed(inputs, name, co_placement, size, in_flight))
                    except InputError as error:
                        reason = f"{name}: {error.violations[0].problem}"
                        refused.setdefault(reason, Candidate(verdict=Verdict.REFUSED, reason=reason))
        distinct = {(str(one.parts), one.size, one.in_flight): one for one in reversed(found)}
        best = sorted(distinct.values(), key=lambda one: one.estimate_s)[: self.finalists]
        return [*(_judged(inputs.problem, one) for one in best), *refused.values()]

    def _questions(self, inputs: PlacementInputs) -> Iterator[tuple[int, int]]:
        """Yield sizes of micro-batches, each with micro-batches under way at once."""
        problem = inputs.problem
        for size in inputs.costs.sizes:
            count = problem.job.global_batch // size
            most = {1, problem.job.cluster.ranks, 2 * problem.job.cluster.ranks}
            yield from ((size, one) for one in sorted({min(count, one) for one in most}))


def _require_placement(problem: Problem, name: str) -> None:
    """Refuse pins, goals and methods that a placement does not know; `name` is the planner's."""
    require_partition(problem, name)
    pins = problem.pins
    alone = {"dp": pins.dp, "tp": pins.tp, "pp": pins.pp}
    if wrong := [axis for axis, pinned in alone.items() if pinned not in (None, 1)]:
        raise InputError(Violation(f"plan.{wrong[0]}", f"{name} places whole layers, each once", "1"))


def _placed(
    inputs: PlacementInputs, name: str, co_placement: CoPlacement, size: int, in_flight: int
) -> _Placed:
    """Place the layers by one of the ways.

    Raises:
        InputError: when a layer fits on no device.
    """
    graph, devices = inputs.graph(size, in_flight), inputs.devices()
    reduced = prepared(graph, devices, co_placement)
    placement = get_placer(name)(reduced.fused, devices)
    device = reduced.unfused(placement.device)
    parts = _in_order(inputs.problem, segments(graph, device, reduced.sequence(placement)))
    each = [int(graph.ticks[members, place].sum()) for place, members in parts]
    busy = np.bincount([place for place, _ in parts], weights=each)
    count = inputs.problem.job.global_batch // size
    bound = earliest_task_first_bound_ticks(reduced.fused, devices) if name == "m-etf" else None
    words = [
        f"{name}: {format_seconds(placement.makespan / TICKS_PER_S)} for a micro-batch",
        f"no placement below {format_seconds(lower_bound_ticks(graph) / TICKS_PER_S)}",
        "no bound above" if bound is None else f"bound {format_seconds(bound / TICKS_PER_S)}",
    ]
    return _Placed(
        estimate_s=(placement.makespan + (count - 1) * float(busy.max())) / TICKS_PER_S,
        parts=parts,
        times=_relative(each),
        size=size,
        in_flight=in_flight,
        recompute=inputs.recompute,
        reason=", ".join(words),
    )


def _in_order(problem: Problem, parts: Sequence[tuple[int, list[int]]]) -> list[tuple[int, list[int]]]:
    """Return segments after all that they read."""
    place_of = {tuple(layers): place for place, layers in parts}
    stages = [StageOfLayers(layers, 1, "none", 1) for layers in place_of]
    return [(place_of[one.layers], list(one.layers)) for one in in_order(problem.job.graph, stages)]


def _relative(ticks: Sequence[int]) -> list[int]:
    """Return times as whole numbers up to 1000, at least 1, which are short enough for a plan."""
    return [max(1, round(1000 * one / max(ticks))) for one in ticks]


def _judged(problem: Problem, found: _Placed) -> Candidate:
    candidate = Candidate(verdict=Verdict.REFUSED, reason="", estimate_s=None)
    try:
        plan = plan_of(problem, found)
    except InputError as error:
        return replace(candidate, reason=f"{found.reason}; {error.violations[0]}")
    one = judged(problem, replace(candidate, layout=said_as_layout(plan)), plan)
    return replace(one, reason=f"{found.reason}; {one.reason}")


def plan_of(problem: Problem, found: _Placed) -> Plan:
    """Return the plan of a placement.

    Raises:
        InputError: when methods of the job do not go with the plan, or a device is left out before others.
    """
    used = sorted({place for place, _ in found.parts})
    if used != list(range(len(used))):
        idle = min({*range(used[-1])} - {*used})
        raise InputError(Violation("placement", f"device {idle} gets no layer, and device {used[-1]} does"))
    pins, micro_batches = problem.pins, problem.job.global_batch // found.size
    layout = Layout(
        pp=len(used),
        dp=1,
        tp=1,
        loops=1,
        micro_batch_size=found.size,
        schedule=Placed.name,
        sync=problem.sync or DENSE,
        sharding=pins.sharding or "zero-0",
        recompute=found.recompute,
        **pins.besides(DECIDED),
    )
    plan = build_plan(problem.job, layout, [1.0] * len(problem.job.graph.layers))
    stages = tuple(
        Stage(
            layers=tuple(layers),
            replicas=(Replica(ranks=(place,), micro_batches=micro_batches),),
            recompute=found.recompute,
        )
        for place, layers in found.parts
    )
    order = Choice(
        name=Placed.name,
        options={"in_flight": found.in_flight, "times": " ".join(map(str, found.times))},
    )
    return plan.model_copy(update={"stages": stages, "schedule": order})


# Decisions of a layout that a placement makes.
DECIDED = {"pp", "dp", "tp", "loops", "micro_batch_size", "schedule", "sharding", "recompute"}
