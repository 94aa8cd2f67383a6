"""`UnlikeSpace`: the search for plans with unlike tensor degrees, of stages or of replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar, Generic, Protocol, TypeVar

import numpy as np

from weft.describe.layout import DENSE, Layout
from weft.describe.plan import Choice, Plan, Recompute, Replica, Sharding, Stage
from weft.describe.plan_file import check_plan
from weft.moves.layout import build_plan
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.graphpipe.plans import DECIDED
from weft.planning.planners.weft.mixed import choices
from weft.planning.planners.weft.stages import Dealt
from weft.planning.planners.weft.uneven import SCHEDULE, UnevenSpace
from weft.planning.problem import Problem
from weft.program.arrays import Ints

# The order with split backward passes.
SPLIT = "zb-h1"
# Most stages of one group of nodes.
MOST_STAGES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreePlan:
    """A plan with unlike tensor degrees, and the estimate of its step."""

    plan: Plan
    estimate_s: float


class PlacedRanks(Protocol):
    """Ranks of stages and replicas, before layers are cut and decisions are made."""

    @property
    def replicas(self) -> int: ...

    @property
    def mesh(self) -> Mapping[str, int]:
        """The axes of a plan that differ from those of its layout."""

    @property
    def of_stages(self) -> Sequence[Sequence[Sequence[int]]]:
        """The ranks by stage and replica."""


Ranks = TypeVar("Ranks", bound=PlacedRanks)


class UnlikeSpace(ABC, Generic[Ranks]):
    """The plans of one problem with unlike tensor degrees.

    Attributes:
        shardings: those that are searched where none is pinned.
        uneven: replicas share the batch in any way, not equally.
        paces: how fast devices are, and their memory.
        words: the words of recomputation that a stage may have.
    """

    shardings: ClassVar[Sequence[Sharding]]
    uneven: ClassVar[bool]

    def __init__(self, problem: Problem, bounds: Bounds) -> None:
        self.problem, self.bounds = problem, bounds
        self.paces = UnevenSpace(problem, bounds)
        self.words = choices(problem) or (_pinned_word(problem),)

    def search(self) -> list[DegreePlan]:
        """Return the plans that fit by their bounds, least estimates first: one for each placement.

        Raises:
            InputError: when a profile was not measured at a tensor degree.
        """
        best = (self._best_of(one) for one in self.placements()) if self._is_open() else ()
        return sorted((one for one in best if one is not None), key=lambda one: one.estimate_s)

    @abstractmethod
    def placements(self) -> Iterator[Ranks]:
        """Yield placements with unlike tensor degrees that use every device."""

    @abstractmethod
    def dealt(self, placed: Ranks, layout: Layout) -> Dealt | None:
        """Return cuts of the layers and shares of the batch; None if nothing fits."""

    @abstractmethod
    def reduced_s(self, placed: Ranks, layout: Layout, found: Dealt) -> float:
        """Return the seconds in which the replicas of the slowest stage reduce its gradient."""

    def _is_open(self) -> bool:
        """Return True if the run file leaves tensor degrees open, and asks for no other axis or order."""
        problem, pins = self.problem, self.problem.pins
        open_axes = pins.tp is None and {pins.cp, pins.ep, pins.loops} <= {None, 1}
        asked = pins.schedule in (None, SCHEDULE) and (problem.sync or DENSE) == DENSE
        return open_axes and asked and problem.job.graph.is_chain

    def _best_of(self, placed: Ranks) -> DegreePlan | None:
        """Return the plan of a placement with the least estimate; None if none fits."""
        found: tuple[float, Layout, Dealt] | None = None
        for layout in self._layouts(placed.replicas):
            dealt = self.dealt(placed, layout)
            if dealt is None:
                continue
            estimate_s = dealt.pipeline_s + self.reduced_s(placed, layout, dealt)
            if found is None or estimate_s < found[0]:
                found = estimate_s, layout, dealt
        if found is None:
            return None
        estimate_s, layout, dealt = found
        return DegreePlan(plan=self._plan_of(placed, layout, dealt), estimate_s=estimate_s)

    def _layouts(self, replicas: int) -> Iterator[Layout]:
        """Yield the decisions of plans besides stages, as layouts of one stage on one tensor rank."""
        pins, batch = self.problem.pins, self.problem.job.global_batch
        unit = 1 if self.uneven else replicas
        sizes = [2**turn for turn in range((batch // replicas).bit_length())]
        for size in sizes if pins.micro_batch_size is None else [pins.micro_batch_size]:
            for sharding in self.shardings if pins.sharding is None else (pins.sharding,):
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

    def _plan_of(self, placed: Ranks, layout: Layout, dealt: Dealt) -> Plan:
        shares = dealt.micro_batches if len(set(dealt.micro_batches)) > 1 else None
        layout, job = replace(layout, micro_batches_per_replica=shares), self.problem.job
        plan = build_plan(job, layout, [1.0] * len(job.graph.layers))
        ends = [0, *accumulate(dealt.layers_per_stage)]
        stages = tuple(
            Stage(
                layers=tuple(range(ends[index], ends[index + 1])),
                replicas=tuple(
                    Replica(ranks=tuple(own), micro_batches=share)
                    for own, share in zip(held, dealt.micro_batches, strict=True)
                ),
                recompute=self.words[dealt.ways[index]],
            )
            for index, held in enumerate(placed.of_stages)
        )
        return plan.model_copy(update={"stages": stages, "mesh": {**plan.mesh, **placed.mesh}})


def in_kinds(degrees: Ints, paces: Ints) -> tuple[list[tuple[int, int]], Ints]:
    """Return the pairs of a tensor degree and a pace, and for each stage and replica its pair's number.

    For `deal`, devices of one pace and unlike degrees have unlike paces. All arrays have shape (stages,
    replicas).
    """
    kinds: dict[tuple[int, int], int] = {}
    pairs = zip(degrees.flat, paces.flat, strict=True)
    numbers = [kinds.setdefault((int(degree), int(pace)), len(kinds)) for degree, pace in pairs]
    return list(kinds), np.array(numbers).reshape(paces.shape)


def in_orders(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Yield a plan in its order of micro-batches, and in one with split backward passes, if the job may."""
    job, splits = problem.job, problem.pins.schedule is None and len(plan.stages) > 1
    names = (SCHEDULE, SPLIT) if splits else (SCHEDULE,)
    for name in names:
        ordered = plan.model_copy(update={"schedule": Choice(name=name)})
        if not check_plan(ordered, job.graph, job.cluster):
            yield ordered


def _pinned_word(problem: Problem) -> Recompute:
    """Return the pinned recomputation of all stages; none where it is open or stated for each stage."""
    pinned = problem.pins.recompute
    return pinned if isinstance(pinned, str) else "none"
