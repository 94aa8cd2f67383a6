"""The planners that place operators: `baechi`, and each way to place by its own name (SoCC 2020).

Operators are placed for one micro-batch, by their times on every device and the links between devices. Runs
of operators on a device become stages, and micro-batches flow through them in the order `placed`. With a
single micro-batch the plan is Baechi's own: all devices but a few wait. The simulator ranks the plans. It
also judges small changes of the best one, which no paper of Baechi has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from weft.describe.layout import Layout
from weft.errors import InputError
from weft.moves.layout import refuse
from weft.planning.placement.limits import STEADY, placed_within_limits
from weft.planning.placement.placers import BAECHI, get_placer
from weft.planning.placement.preparation import CoPlacement, prepared
from weft.planning.planners.baechi.inputs import PlacementInputs, PlacementQuestion, questions
from weft.planning.planners.baechi.plans import Judged, PlacedStages, changes
from weft.planning.planners.base import Candidate, Ranking, Verdict
from weft.planning.planners.graphpipe.questions import (
    degrees_of,
    least_layout,
    partition_layouts,
    require_partition,
)
from weft.planning.planners.homogeneous import rank_key
from weft.planning.planners.simulated import prepare
from weft.planning.problem import Problem
from weft.program.schedules.placed import PlacedOrder

# All are tried: groups as the paper makes them, smaller ones that leave branches apart, and none.
CO_PLACEMENTS: tuple[CoPlacement, ...] = ("readers", "chains", "none")
# Placements to change step by step: the best one may be a poor beginning.
STARTS = 3
# Without groups, placing more layers takes too long.
MOST_ALONE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlanner:
    """A search over sizes of micro-batches, with one or several ways to place operators.

    Attributes:
        name: the name that users type.
        placers: names of `weft.planning.placement.placers.PLACERS`.
        otherwise: placers to ask where no placement by these fits, as memory is tight.
        finalists: placements to simulate, least estimates first.
        changes: changed placements to simulate, from each of the `STARTS` best ones on.
    """

    name: str
    placers: tuple[str, ...]
    otherwise: tuple[str, ...] = ()
    finalists: int = 12
    changes: int = 0

    def space(self, problem: Problem) -> Iterator[Layout]:
        """Return the degrees and sizes of micro-batches; placements add the stages."""
        order = problem.pins.schedule or PlacedOrder.name
        return (replace(one, schedule=order) for one in partition_layouts(problem))

    def search(self, problem: Problem) -> Ranking:
        """Place the layers for every degree and size of micro-batches, and simulate the best placements.

        Raises:
            InputError: for pins, goals and methods that a placement does not know.
        """
        require_partition(problem, self.name)
        least = least_layout(problem, PlacedOrder.name)
        if (reason := refuse(problem.job, least)) is not None:
            refused = Candidate(layout=least, verdict=Verdict.REFUSED, reason=reason)
            return Ranking(problem=problem, candidates=(refused,))
        prepare(problem)
        every = [PlacementInputs(problem, tp, dp) for tp, dp in degrees_of(problem)]
        candidates: list[Candidate] = []
        for word in every[0].costs.recomputes(every[0].costs.sizes[0]):
            candidates += self._recomputing(problem, [replace(one, recompute=word) for one in every])
            if any(one.verdict is Verdict.FITS for one in candidates):
                break
        return Ranking(problem=problem, candidates=tuple(sorted(candidates, key=rank_key(problem))))

    def _recomputing(self, problem: Problem, every: Sequence[PlacementInputs]) -> list[Candidate]:
        """Return the best placements, simulated, and the reasons of ways that placed nothing."""
        known: list[Judged] = []
        refused: list[Candidate] = []
        for placers in (self.placers, self.otherwise):
            if not any(candidate.verdict is Verdict.FITS for candidate, _ in known):
                found, reasons = self._placements(every, placers)
                # Those under limits are many; in one list they would crowd out the others.
                groups = [found, *(_within_limits(every, way) for way in placers if way in STEADY)]
                best = {
                    one.decided: one
                    for group in groups
                    for one in sorted(group, key=lambda one: one.estimate_s)[: self.finalists]
                }
                known += [(one.judged(), one) for one in best.values()]
                refused += reasons
        known += self._changed(problem, known)
        return [*(candidate for candidate, _ in known), *refused]

    def _placements(
        self, every: Sequence[PlacementInputs], placers: Sequence[str]
    ) -> tuple[list[PlacedStages], list[Candidate]]:
        """Return different placements by all ways, and one refusal for each reason."""
        found: dict[object, PlacedStages] = {}
        refused: dict[str, Candidate] = {}
        for question, co_placement in _asked(every):
            devices = question.inputs.devices
            reduced = prepared(question.graph, devices, co_placement)
            for way in placers:
                try:
                    placement = get_placer(way)(reduced.fused, devices)
                except InputError as error:
                    reason = f"{way}: {error.violations[0].problem}"
                    refused.setdefault(reason, Candidate(verdict=Verdict.REFUSED, reason=reason))
                    continue
                for at_messages in (False, True):
                    one = PlacedStages(question, reduced, placement, way, at_messages)
                    found.setdefault(one.decided, one)
        return [*found.values()], [*refused.values()]

    def _changed(self, problem: Problem, known: Sequence[Judged]) -> list[Judged]:
        """Return placements that are each better than all before: those that a change of one leads to."""
        key = rank_key(problem)
        fitting = [pair for pair in known if pair[0].verdict is Verdict.FITS]
        starts = sorted(fitting, key=lambda pair: key(pair[0]))[:STARTS]
        return [
            tried for start in starts for tried, better in changes(problem, start, self.changes) if better
        ]


def _asked(every: Sequence[PlacementInputs]) -> Iterator[tuple[PlacementQuestion, CoPlacement]]:
    """Yield every question, with each way to join its operators."""
    for question in (one for inputs in every for one in questions(inputs)):
        small = question.graph.operators <= MOST_ALONE
        yield from ((question, one) for one in (CO_PLACEMENTS if small else CO_PLACEMENTS[:2]))


def _within_limits(every: Sequence[PlacementInputs], way: str) -> list[PlacedStages]:
    """Return different placements by one way under limits of memory."""
    found: dict[object, PlacedStages] = {}
    for question, co_placement in _asked(every):
        placed = placed_within_limits(question.graph, question.inputs.devices, co_placement, STEADY[way])
        for (reduced, placement), at_messages in product(placed, (False, True)):
            one = PlacedStages(question, reduced, placement, way, at_messages)
            found.setdefault(one.decided, one)
    return [*found.values()]


# Baechi's three ways, and small changes of the best placement.
BAECHI_PLANNER = PlacementPlanner(name="baechi", placers=BAECHI, otherwise=("expert",), changes=30)
