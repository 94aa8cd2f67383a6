"""A job that goes on without some devices: plans with few moved bytes, and plans with short steps.

A repair leaves every layer where it is, and places those of lost devices around them. It does so by m-ETF
(Baechi, SoCC 2020). Changes of it, and plans from scratch, move more. Only plans count that no other plan
beats in both moved bytes and predicted step. Each pays for its further bytes after some steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from math import ceil

import numpy as np

from weft.describe.cluster_file import parse_cluster
from weft.describe.left_out import Remaining, remaining
from weft.describe.one_line import one_line
from weft.describe.plan_subject import PlanSubject
from weft.describe.run_file import RunFile
from weft.describe.units import format_bytes
from weft.errors import InputError, Violation
from weft.planning.moved_states import (
    CHECKPOINT_BYTES_PER_S,
    Holdings,
    MovedStates,
    holdings,
    moved_states,
    on_equal_devices,
    uncounted,
)
from weft.planning.placement.board import UNPLACED
from weft.planning.placement.graph import OperatorGraph
from weft.planning.placement.list_scheduler import earliest_task_first
from weft.planning.placement.preparation import CoPlacement, PreparedGraph, prepared
from weft.planning.planned import DEFAULT_PLANNER, posed
from weft.planning.planned_job import PlannedJob
from weft.planning.planners import Candidate, Verdict, get_planner
from weft.planning.planners.baechi.inputs import PlacementInputs, PlacementQuestion, questions
from weft.planning.planners.baechi.planner import CO_PLACEMENTS
from weft.planning.planners.baechi.plans import PlacedStages, changes
from weft.planning.planners.graphpipe.questions import require_partition
from weft.planning.planners.homogeneous import rank_key
from weft.planning.planners.simulated import judged_plan
from weft.planning.problem import Problem
from weft.program.arrays import Ints
from weft.progress import CountedWork, ProgressReport, unwatched

# Simulated plans: repairs, changes of the best one, and the best plans of each search from scratch.
MOST_REPAIRS, MOST_CHANGES, MOST_SEARCHED = 12, 40, 12
FROM_SCRATCH = ("baechi", DEFAULT_PLANNER)
REPAIR, CHANGED_REPAIR = "repair", "changed repair"


@dataclass(frozen=True, kw_only=True)
class NextPlan:
    """A plan for the remaining devices; `way` is how it was found, and `moved` what its devices receive."""

    way: str
    candidate: Candidate
    moved: MovedStates

    def __repr__(self) -> str:
        return one_line(self, f"{self.way}: {self.candidate.words}, {format_bytes(self.moved.total_bytes)}")


@dataclass(frozen=True, kw_only=True)
class Replanning:
    """The plans of a job without some devices.

    Attributes:
        before: the job on all devices.
        run, problem: the job on the remaining devices.
        former_ranks: by rank, the one that a remaining device has in the plan before.
        front: plans that no other beats in both moved bytes and step; bytes rise and steps fall.
        considered: plans whose bytes and steps are known.
        refused: by the way to plan, why it found nothing.
    """

    before: PlannedJob
    run: RunFile
    problem: Problem
    former_ranks: tuple[int, ...]
    front: tuple[NextPlan, ...]
    considered: int
    refused: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return one_line(
            self, f"{len(self.front)} of {self.considered} plans, {self.problem.job.cluster.name}"
        )

    @property
    def chosen(self) -> NextPlan:
        """The plan with the least moved bytes."""
        return self.front[0]

    @cached_property
    def break_even_steps(self) -> tuple[int | None, ...]:
        """By plan of the front, the steps after which it has paid for its bytes; None for the first.

        The plan before it on the front is the one that it is compared with.
        """
        return (None, *(paid_after(one, next_) for one, next_ in pairwise(self.front)))

    @property
    def assumed(self) -> str | None:
        """The assumption about lost states in the seconds; None if none are lost."""
        if not any(one.moved.lost_bytes for one in self.front):
            return None
        speed = f"{format_bytes(round(CHECKPOINT_BYTES_PER_S))}/s"
        return (
            f"states that no remaining device has come from the newest checkpoint, at {speed} for each "
            "device; devices still have their own states of its step"
        )


def paid_after(one: NextPlan, other: NextPlan) -> int:
    """Return the steps after which a plan with shorter steps has paid for the longer moving of its states."""
    longer_s = other.moved.seconds - one.moved.seconds
    return max(0, ceil(longer_s / (one.candidate.step_s - other.candidate.step_s)))


def replan(before: PlannedJob, words: Sequence[str], report: ProgressReport = unwatched) -> Replanning:
    """Plan a job again without the nodes and devices that words name; see `weft.describe.left_out`.

    Raises:
        InputError: for words that name nothing, a plan whose states are not counted by rank, or if no plan
            fits on the remaining devices.
    """
    if violations := [*uncounted(before.plan), *_fixed(before)]:
        raise InputError(violations)
    left, former_ranks = _remaining(before, words)
    subject = _smaller(before, left, words)
    run, problem = posed(subject, before.plan)
    held = holdings(before.plan, before.problem.job.graph)
    held = {rank: held[former] for rank, former in enumerate(former_ranks) if former in held}
    ways: dict[str, Callable[[], Iterator[tuple[str, Candidate]]]] = {
        REPAIR: partial(_repairs, problem, held),
        **{name: partial(_searched, problem, held, name) for name in FROM_SCRATCH},
    }
    found: list[NextPlan] = []
    refused: dict[str, str] = {}
    for way in CountedWork(report, "planned again by", len(ways), "ways").each(ways):
        try:
            found += _counted(problem, held, ways[way]())
        except InputError as error:
            refused[way] = str(error.violations[0])
    if not found:
        raise InputError([Violation(f"{way}: no plan", reason) for way, reason in refused.items()])
    return Replanning(
        before=before,
        run=run,
        problem=problem,
        former_ranks=former_ranks,
        front=front(found),
        considered=len(found),
        refused=refused,
    )


def front(plans: Sequence[NextPlan]) -> tuple[NextPlan, ...]:
    """Return the plans that no other beats in both moved bytes and step, by rising bytes."""
    kept: list[NextPlan] = []
    for one in sorted(plans, key=lambda one: (one.moved.total_bytes, one.candidate.step_s)):
        if not kept or one.candidate.step_s < kept[-1].candidate.step_s:
            kept.append(one)
    return tuple(kept)


def _fixed(before: PlannedJob) -> list[Violation]:
    """Return what a job has planned for later, which holds for all of its devices."""
    if before.run.plan.then is None:
        return []
    return [Violation("plan.then", "the plan is to be followed by another one; leave it out")]


def _remaining(before: PlannedJob, words: Sequence[str]) -> tuple[Remaining, tuple[int, ...]]:
    """Return the remaining devices, and for each its rank in the plan before.

    Words count devices of the whole cluster, also where the plan before leaves some out.
    """
    planned, already = before.problem.job.cluster, before.run.cluster.without or ()
    if not already:
        left = remaining(planned, words)
        return left, left.ranks
    whole = parse_cluster(before.run.cluster.use)
    then = remaining(whole, already)
    if then.cluster.fingerprint != planned.fingerprint:
        problem = f"{before.run.cluster.use} is no longer the cluster of the plan, which leaves out "
        raise InputError(Violation("cluster.use", problem + " and ".join(already)))
    left = remaining(whole, [*already, *words])
    return left, tuple(then.ranks.index(rank) for rank in left.ranks)


def _smaller(before: PlannedJob, left: Remaining, words: Sequence[str]) -> PlanSubject:
    """Return the subject on the remaining devices, without pins that hold for all of them."""
    subject = before.problem.subject(before.run).pinned(before.plan)
    run = subject.run
    already = run.cluster.without or ()
    opened = dict.fromkeys(("pp", "dp", "loops", "schedule", "splits", "sharding", "island"))
    recompute = run.plan.recompute if isinstance(run.plan.recompute, str) else None
    tables = {
        "cluster": run.cluster.model_copy(update={"without": (*already, *words)}),
        "plan": run.plan.model_copy(update={**opened, "recompute": recompute}),
        "goal": run.goal.model_copy(update={"deadline_hours": None}),
    }
    return subject.model_copy(update={"cluster": left.cluster, "run": run.model_copy(update=tables)})


def _counted(
    problem: Problem, held: Holdings, candidates: Iterator[tuple[str, Candidate]]
) -> Iterator[NextPlan]:
    """Yield the fitting plans with their moved bytes."""
    network, ranks = problem.cost_model.network, problem.job.cluster.ranks
    for way, candidate in candidates:
        plan = candidate.plan
        if candidate.verdict is Verdict.FITS and plan is not None and not uncounted(plan):
            moved = moved_states(held, holdings(plan, problem.job.graph), ranks, network)
            yield NextPlan(way=way, candidate=candidate, moved=moved)


def _searched(problem: Problem, held: Holdings, name: str) -> Iterator[tuple[str, Candidate]]:
    """Yield the best plans of a search from scratch, on those of equal devices that have the most of them.

    Raises:
        InputError: when the planner cannot plan the job, or nothing fits.
    """
    ranking = get_planner(name).search(problem)
    plans = [(one, one.plan) for one in ranking.fitting if one.plan is not None]
    counted = [pair for pair in plans if not uncounted(pair[1])]
    if not counted:
        words = ranking.closest[0].reason if not ranking.fitting else "no plan without divided layers fits"
        raise InputError(Violation("layouts", words))
    for one, found in counted[:MOST_SEARCHED]:
        yield name, one
        plan = on_equal_devices(found, problem.job, held)
        if plan != found:
            yield name, judged_plan(problem, plan)


def _repairs(problem: Problem, held: Holdings) -> Iterator[tuple[str, Candidate]]:
    """Yield plans that keep layers where they are, and changes of the best one.

    Raises:
        InputError: when the job's pins or methods go with no placement, or none fits.
    """
    require_partition(problem, REPAIR)
    inputs = PlacementInputs(problem, 1, 1)
    reason = ""
    for word in inputs.costs.recomputes(inputs.costs.sizes[0]):
        placed, refused = _placed(replace(inputs, recompute=word), held)
        judged = [(one.judged(), one) for one in placed]
        fitting = [pair for pair in judged if pair[0].verdict is Verdict.FITS]
        if fitting:
            yield from ((REPAIR, candidate) for candidate, _ in fitting)
            # First of the best repair, then of each better plan.
            best = min(fitting, key=lambda pair: rank_key(problem)(pair[0]))
            yield from ((CHANGED_REPAIR, one) for (one, _), _ in changes(problem, best, MOST_CHANGES))
            return
        reason = reason or next((candidate.reason for candidate, _ in judged), refused)
    raise InputError(Violation("placement", reason))


def _placed(inputs: PlacementInputs, held: Holdings) -> tuple[list[PlacedStages], str]:
    """Return repairs with the least estimates, and why others place nothing."""
    found: dict[object, PlacedStages] = {}
    reason = ""
    home: Ints | None = None
    for question in questions(inputs):
        home = _homes(question.graph, held) if home is None else home
        for co_placement in CO_PLACEMENTS:
            reduced = _staying(question, home, co_placement)
            pinned = np.empty(reduced.fused.operators, dtype=np.int64)
            pinned[reduced.member_of] = home
            try:
                placement = earliest_task_first(reduced.fused, inputs.devices, pinned=pinned.tolist())
            except InputError as error:
                reason = reason or error.violations[0].problem
                continue
            for at_messages in (False, True):
                one = PlacedStages(question, reduced, placement, "m-etf", at_messages)
                found.setdefault(one.decided, one)
    return sorted(found.values(), key=lambda one: one.estimate_s)[:MOST_REPAIRS], reason


def _homes(graph: OperatorGraph, held: Holdings) -> Ints:
    """Return the device on which each layer stays, `UNPLACED` for lost ones; shape (layers,).

    Of several devices that have a layer, the one with the most of its states keeps it. Of those with equally
    much, it is the one with the least work so far.
    """
    has: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for rank, pieces in held.items():
        for piece, (first, last) in pieces.items():
            has[piece.unit][rank] += (last - first) * piece.element_bytes
    home = np.full(graph.operators, UNPLACED, dtype=np.int64)
    busy = [0] * graph.ticks.shape[1]
    for group in dict.fromkeys(graph.groups.tolist()):
        members = np.flatnonzero(graph.groups == group)
        states: dict[int, int] = defaultdict(int)
        for layer in members.tolist():
            for rank, own in has[layer].items():
                states[rank] += own
        if states:
            best = min(states, key=lambda rank: (-states[rank], busy[rank], rank))
            home[members] = best
            busy[best] += int(graph.ticks[members, best].sum())
    return home


def _staying(question: PlacementQuestion, home: Ints, co_placement: CoPlacement) -> PreparedGraph:
    """Return the graph with co-placed groups, each divided by the homes of its layers."""
    graph, devices = question.graph, question.inputs.devices
    together = prepared(graph, devices, co_placement)
    apart = together.fused.groups[together.member_of] * (devices.count + 1) + home - UNPLACED
    groups = np.unique(apart, return_inverse=True)[1]
    return prepared(replace(graph, groups=groups), devices, "none")
