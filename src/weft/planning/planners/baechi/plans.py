"""From a placement to a Plan whose stages are runs of operators on a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np

from weft.describe.layout import DENSE, Layout
from weft.describe.plan import Choice, Plan, Replica, Stage
from weft.describe.units import format_seconds
from weft.errors import InputError, Violation
from weft.moves.layout import build_plan
from weft.planning.placement.board import Placement
from weft.planning.placement.bounds import (
    communication_ratios,
    earliest_task_first_bound_ticks,
    lower_bound_ticks,
)
from weft.planning.placement.list_scheduler import earliest_task_first
from weft.planning.placement.preparation import PreparedGraph
from weft.planning.planners.baechi.inputs import TICKS_PER_S, PlacementQuestion
from weft.planning.planners.baechi.segments import segments
from weft.planning.planners.base import Candidate, Verdict
from weft.planning.planners.graphpipe.part_plans import StageOfLayers
from weft.planning.planners.graphpipe.plans import in_order
from weft.planning.planners.homogeneous import rank_key
from weft.planning.planners.simulated import judged_plan
from weft.planning.problem import Problem
from weft.program.arrays import Ints
from weft.program.schedules.placed import PlacedOrder, PlacedZeroBubble

# Split backward passes keep more tensors, so they must make a step shorter by so much.
LEAST_GAIN = 0.002
# Decisions of a layout that a placement makes.
DECIDED = {
    "pp",
    "dp",
    "tp",
    "loops",
    "layers_per_stage",
    "micro_batch_size",
    "schedule",
    "sharding",
    "recompute",
}


@dataclass(frozen=True)
class PlacedStages:
    """A placement of fused operators, and its stages.

    Attributes:
        way: the name of the placer.
        at_messages: see `segments`.
        splits: True for backward passes in two parts.
    """

    question: PlacementQuestion
    reduced: PreparedGraph
    placement: Placement
    way: str
    at_messages: bool
    splits: bool = False

    @cached_property
    def parts(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The device and the layers of each stage, after all stages that it reads."""
        sequence = self.reduced.sequence(self.placement)
        cut = segments(self.reduced.original, self.device, sequence, at_messages=self.at_messages)
        place_of = {tuple(layers): place for place, layers in cut}
        stages = [StageOfLayers(layers, 1, "none", 1) for layers in place_of]
        ordered = in_order(self.question.inputs.problem.job.graph, stages)
        return tuple((place_of[one.layers], one.layers) for one in ordered)

    @cached_property
    def _ticks(self) -> list[int]:
        """The ticks of each stage."""
        ticks = self.reduced.original.ticks
        return [int(ticks[list(layers), place].sum()) for place, layers in self.parts]

    @cached_property
    def device(self) -> Ints:
        """The device of each layer, shape (layers,)."""
        return self.reduced.unfused(self.placement.device)

    @property
    def estimate_s(self) -> float:
        """The seconds of a step: one micro-batch, and the busiest device with all others."""
        busy = np.bincount(self.device, weights=_own_ticks(self.reduced.original.ticks, self.device))
        others = (self.question.micro_batches - 1) * float(busy.max())
        return (self.placement.makespan + others) / TICKS_PER_S

    @property
    def decided(self) -> tuple[object, ...]:
        """The decisions that distinguish its plan from others."""
        question = self.question
        return self.device.tobytes(), question.inputs.dp, question.size, question.in_flight, self.at_messages

    @property
    def words(self) -> str:
        """The makespan of a micro-batch beside its bounds."""
        makespan_s = self.placement.makespan / TICKS_PER_S
        least_s = lower_bound_ticks(self.reduced.original) / TICKS_PER_S
        bound = None
        if self.way == "m-etf":
            bound = earliest_task_first_bound_ticks(self.reduced.fused, self.question.inputs.devices)
        most = "no bound above" if bound is None else f"bound {format_seconds(bound / TICKS_PER_S)}"
        each = f"{self.way}: {format_seconds(makespan_s)} for a micro-batch of whole passes"
        ratios = communication_ratios(self.reduced.original, self.question.inputs.devices)
        far = len(ratios) and float(np.median(ratios)) > 1.0
        warning = ", and most transfers take longer than what they join: spread little" if far else ""
        return f"{each}, no placement below {format_seconds(least_s)}, {most}{warning}"

    def moved(self) -> Iterator[PlacedStages]:
        """Yield the placements with one group on another device, those of the busiest device first."""
        fused, devices = self.reduced.fused, self.question.inputs.devices
        busy = np.bincount(self.placement.device, weights=_own_ticks(fused.ticks, self.placement.device))
        groups, first = np.unique(fused.groups, return_index=True)
        for row in np.argsort(-busy[self.placement.device[first]], kind="stable").tolist():
            for device in range(devices.count):
                pinned = np.where(fused.groups == groups[row], device, self.placement.device)
                if pinned[first[row]] == self.placement.device[first[row]]:
                    continue
                try:
                    placement = earliest_task_first(fused, devices, pinned=pinned.tolist())
                except InputError:
                    continue
                yield replace(self, placement=placement)

    def judged(self) -> Candidate:
        """Return its plan with the predicted step."""
        try:
            plan = self.plan()
        except InputError as error:
            return Candidate(verdict=Verdict.REFUSED, reason=f"{self.words}; {error.violations[0]}")
        one = judged_plan(self.question.inputs.problem, plan)
        return replace(one, reason=f"{self.words}; {one.reason}")

    def plan(self) -> Plan:
        """Return the plan.

        Raises:
            InputError: when methods of the job do not go with it, or a device gets nothing before others.
        """
        inputs = self.question.inputs
        problem, job = inputs.problem, inputs.problem.job
        used = sorted({place for place, _ in self.parts})
        if used != list(range(len(used))):
            idle = min({*range(used[-1])} - {*used})
            raise InputError(
                Violation("placement", f"device {idle} gets no layer, and device {used[-1]} does")
            )
        if problem.pins.pp not in (None, len(used)):
            raise InputError(Violation("plan.pp", f"{problem.pins.pp} is pinned, and {len(used)} get layers"))
        order = self._order(problem.pins.schedule)
        layout = Layout(
            pp=len(used),
            dp=inputs.dp,
            tp=inputs.tp,
            loops=1,
            micro_batch_size=self.question.size,
            schedule=order.name,
            sync=problem.sync or DENSE,
            sharding=problem.pins.sharding or "zero-0",
            recompute=inputs.recompute,
            # Any cuts: the stages come from the placement.
            layers_per_stage=(len(job.graph.layers) - len(used) + 1, *(1,) * (len(used) - 1)),
            **problem.pins.besides(DECIDED),
        )
        plan = build_plan(job, layout, ())
        stages = tuple(
            Stage(layers=layers, replicas=self._replicas(place), recompute=inputs.recompute)
            for place, layers in self.parts
        )
        return plan.model_copy(update={"stages": stages, "schedule": order})

    def _order(self, pinned: str | None) -> Choice:
        """Return the pinned order, else the one for placements with its options.

        A program refuses orders that give a device no more than one stage, where a placement gives it more.
        """
        split = PlacedZeroBubble.name
        if pinned not in (None, PlacedOrder.name, split):
            return Choice(name=pinned)
        options: dict[str, int | str] = {"in_flight": self.question.in_flight}
        # Whole numbers up to 1000 are short enough for a plan.
        times = [max(1, round(1000 * one / max(self._ticks))) for one in self._ticks]
        if len({*times}) > 1:
            options["times"] = " ".join(map(str, times))
        return Choice(name=pinned or (split if self.splits else PlacedOrder.name), options=options)

    def _replicas(self, place: int) -> tuple[Replica, ...]:
        ranks, share = self.question.inputs.places[place].tolist(), self.question.micro_batches
        return tuple(Replica(ranks=tuple(each), micro_batches=share) for each in ranks)


Judged = tuple[Candidate, PlacedStages]


def changes(problem: Problem, start: Judged, most: int) -> Iterator[tuple[Judged, bool]]:
    """Yield changed placements, simulated, and whether each is better than all before.

    The first one splits backward passes. Each other has one group of the fastest one so far on another
    device. The fastest one may split for next to nothing, and lead to one that gains more.
    """
    key = rank_key(problem)
    best = fastest = start
    changed = start[1].moved()
    if most and problem.pins.schedule is None:
        changed = chain([replace(start[1], splits=True)], changed)
    for _ in range(most):
        if (one := next(changed, None)) is None:
            return
        tried = one.judged(), one
        better = key(tried[0]) < key(best[0]) and not _splits_in_vain(tried, best)
        yield tried, better
        if better:
            best = tried
        if key(tried[0]) < key(fastest[0]):
            fastest, changed = tried, one.moved()


def _splits_in_vain(tried: Judged, best: Judged) -> bool:
    """Return True if a placement splits backward passes for next to nothing."""
    splits = tried[1].splits and not best[1].splits
    return splits and tried[0].step_s > (1.0 - LEAST_GAIN) * best[0].step_s


def _own_ticks(ticks: Ints, device: Ints) -> Ints:
    found: Ints = ticks[np.arange(len(device)), device]
    return found
