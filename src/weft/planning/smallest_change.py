"""The one notch that makes a layout fit: what a rejected layout lacks, and what that costs.

A notch halves the micro-batch, doubles tensor or pipeline ranks at the cost of replicas, or takes
recomputation, of all stages or of the first ones, or sharding one step up. A move of another package counts
as one, too. Of those that fit the one with the shortest predicted step is the smallest change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from weft.describe.layout import Layout
from weft.describe.plan import RECOMPUTES
from weft.errors import InputError
from weft.moves.job import Job
from weft.moves.layout import build_plan, refuse
from weft.moves.sharers import among_replicas
from weft.planning.planners import Candidate, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.moved import moved
from weft.planning.planners.simulated import simulated
from weft.planning.problem import Problem
from weft.predict.cost.memory import SHARDINGS

# So many counts of first stages are tried at most.
_MOST_FIRST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallestChange:
    """A change of one notch in words, such as ``recompute none -> selective``, and the layout it leads to."""

    words: str
    candidate: Candidate

    @property
    def step_s(self) -> float:
        """The predicted step of the changed layout."""
        return self.candidate.step_s


class SmallestChanges:
    """Finds smallest changes in one problem; `known` are candidates that need not be simulated again."""

    def __init__(self, problem: Problem, known: Iterable[Candidate] = ()) -> None:
        self._problem = problem
        self._bounds = Bounds(problem)
        self._judged = {one.words: one for one in known if one.plan is not None}

    def of_candidate(self, candidate: Candidate) -> SmallestChange | None:
        """The smallest change of a candidate; None where it is not too big, or no layout says it."""
        too_big = candidate.verdict is Verdict.TOO_BIG and candidate.layout is not None
        return self.of(candidate.chain) if too_big else None

    def of(self, layout: Layout) -> SmallestChange | None:
        """The smallest change of a layout that does not fit; None where no notch is enough."""
        best: SmallestChange | None = None
        for bound_s, words, changed in sorted(self._possible(layout), key=lambda one: one[0]):
            if best is not None and bound_s >= best.step_s:
                break
            judged = self._judge(changed)
            if judged.verdict is Verdict.FITS and (best is None or judged.step_s < best.step_s):
                best = SmallestChange(words=words, candidate=judged)
        return best

    def _possible(self, layout: Layout) -> Iterator[tuple[float, str, Layout]]:
        """Legal notches that the bounds of memory let pass, with the lower bounds of their steps."""
        for words, changed in [*notches(self._problem.job, layout), *self._moved(layout)]:
            if refuse(self._problem.job, changed) is not None:
                continue
            try:
                bound_s = self._bounds.step_s(changed)
            except InputError:
                continue  # a profile was not measured there
            if self._bounds.holding(changed).total <= self._bounds.largest_memory_bytes:
                yield bound_s, words, changed

    def _moved(self, layout: Layout) -> Iterator[tuple[str, Layout]]:
        """What moves of other packages make of it."""
        plan = build_plan(self._problem.job, layout, self._bounds.layer_seconds(layout))
        for move, one in moved(self._problem, layout, plan, self._bounds):
            if one.verdict is not Verdict.REFUSED:
                yield move.name, one.chain

    def _judge(self, layout: Layout) -> Candidate:
        key = str(layout)
        if key not in self._judged:
            asked = Candidate(layout=layout, verdict=Verdict.PRUNED, reason="")
            self._judged[key] = simulated(self._problem, asked, self._bounds.layer_seconds(layout))
        return self._judged[key]


def notches(job: Job, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Every change of one notch, in words and made; what comes out may not be legal."""
    size = layout.micro_batch_size
    if size % 2 == 0:
        shares = layout.micro_batches_per_replica
        doubled = None if shares is None else tuple(2 * share for share in shares)
        halved = replace(layout, micro_batch_size=size // 2, micro_batches_per_replica=doubled)
        yield f"micro-batch size {size} -> {size // 2}", halved
    yield from _degrees(job, layout)
    yield from _recomputations(job, layout)
    if layout.sharding != SHARDINGS[-1]:
        further = SHARDINGS[SHARDINGS.index(layout.sharding) + 1]
        yield f"{layout.sharding} -> {further}", replace(layout, sharding=further)


def _recomputations(job: Job, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """One word further: in the first stages alone, which keep most micro-batches under most orders, and in
    all. Where stages recompute unlike each other: all as the one that recomputes most."""
    if layout.recompute_per_stage is not None:
        yield f"recompute {layout.recompute} in all stages", layout.recomputing(layout.recompute)
        return
    if layout.recompute == RECOMPUTES[-1]:
        return
    known = [one for one in RECOMPUTES if one != "selective" or job.graph.knows_products]
    more, stages = known[known.index(layout.recompute) + 1], layout.stages
    words = f"recompute {layout.recompute} -> {more}"
    step = -(-stages // _MOST_FIRST)
    for first in range(step, stages, step):
        some = layout.recomputing([more] * first + [layout.recompute] * (stages - first))
        yield f"{words} in the first {'stage' if first == 1 else f'{first} stages'} of {stages}", some
    yield words, layout.recomputing(more)


def _degrees(job: Job, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Half the replicas, and twice the ranks of one of the other axes; tensor ranks stay on a node. More
    stages all recompute like the one that did most."""
    tensor, pipeline, data = layout.tp, layout.pp, layout.dp
    if data % 2:
        return
    fewer = among_replicas(replace(layout.regular, dp=data // 2))
    replicas = f"dp {data} -> {data // 2}"
    width = 2 * tensor * layout.cp
    if all(group.devices % width == 0 for group in job.cluster.groups):
        more = replace(fewer, tp=2 * tensor).recomputing(layout.recomputes)
        yield f"tp {tensor} -> {2 * tensor}, {replicas}", more
    yield f"pp {pipeline} -> {2 * pipeline}, {replicas}", replace(fewer, pp=2 * pipeline)
