"""Arms of a study: learning rates and dampings from a grid, and the curves of those that are reported.

Tuning takes seeds of its own. A grid grows until its best point is inside. Arms with K-FAC run in one
process, with fresh inverses every few steps, and as pipelines, with windows as `weft plan` finds them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from trainings import NO_LOSS, Arm, Curve, Job, Ranks, Training, planned, train_beside

from weft.describe.plan import Plan
from weft.planning.decisions import decided_words
from weft.planning.planned_job import PlannedJob

GROWTH = 3.0
# Dampings below have no effect beside rounding.
LEAST_DAMPING = 1e-7
TUNING_SEED = 1000
LAST = 5


class Effort(NamedTuple):
    """Steps, seeds that tune and that are reported, how often grids grow, pipelines, sets of processes."""

    steps: int
    tuning: int
    reported: int
    growths: int
    pipelines: tuple[int, ...]
    processes: int


@dataclass(frozen=True)
class Grid:
    """The points to try first of an arm; no dampings: without K-FAC."""

    arm: Arm
    rates: tuple[float, ...]
    dampings: tuple[float, ...] = ()

    def points(self) -> Iterator[Arm]:
        for rate, damping in product(self.rates, self.dampings or (None,)):
            yield replace(self.arm, rate=rate, damping=damping)


@dataclass
class Tuned:
    """The best point of a grid, and the losses of all points, (rate, damping, loss)."""

    arm: Arm
    tried: list[tuple[float, float | None, float]]

    @property
    def inside(self) -> bool:
        return not _borders(self.arm, {(rate, damping): loss for rate, damping, loss in self.tried})

    def reported(self, plan: Plan, effort: Effort) -> list[Training]:
        return [Training(self.arm, plan, effort.steps, seed) for seed in range(effort.reported)]


def final(curve: Curve) -> float:
    """The mean loss of the last steps."""
    return statistics.fmean(curve.losses[-LAST:])


def tune(grid: Grid, plan: Plan, effort: Effort, all_ranks: Sequence[Ranks]) -> Tuned:
    """Train the points of a grid, and of wider ones while the best point is at a border."""
    steps, seeds = effort.steps, effort.tuning
    losses: dict[tuple[float, float | None], float] = {}
    new = list(grid.points())
    for _ in range(effort.growths + 1):
        trainings = [
            Training(point, plan, steps, TUNING_SEED + seed) for point in new for seed in range(seeds)
        ]
        curves = train_beside(all_ranks, trainings)
        for place, point in enumerate(new):
            own = [final(one) for one in curves[place * seeds : (place + 1) * seeds]]
            losses[point.rate, point.damping] = statistics.fmean(own)
        rate, damping = min(losses, key=losses.__getitem__)
        best = replace(grid.arm, rate=rate, damping=damping)
        new = [one for one in _borders(best, losses) if (one.rate, one.damping) not in losses]
        if not new:
            break
    tried = [(*point, loss) for point, loss in sorted(losses.items(), key=lambda one: one[1])]
    return Tuned(best, tried)


def _borders(best: Arm, losses: dict[tuple[float, float | None], float]) -> list[Arm]:
    """The neighbours of the best point that are not there yet."""
    found = []
    for factor in (1.0 / GROWTH, GROWTH):
        found.append(replace(best, rate=best.rate * factor))
        if best.damping is not None and best.damping * factor >= LEAST_DAMPING:
            found.append(replace(best, damping=best.damping * factor))
    known = [(rate, damping or 0.0) for rate, damping in losses]

    def is_known(one: Arm) -> bool:
        point = (one.rate, one.damping or 0.0)
        return any(all(abs(a - b) <= 0.2 * b for a, b in zip(point, other, strict=True)) for other in known)

    return [one for one in found if not is_known(one)]


@dataclass
class Finalist:
    """The curves of an arm with its tuned point, by seed.

    Attributes:
        where: how its plan runs.
        losses: of each step, by seed.
        age: the mean age of the curvature that steps used, of the second half of steps.
    """

    arm: Arm
    where: str
    tried: list[tuple[float, float | None, float]]
    inside: bool
    losses: list[list[float]]
    age: float

    @classmethod
    def of(cls, tuned: Tuned, where: str, curves: Sequence[Curve]) -> Finalist:
        ages = [age for one in curves for age in one.ages[len(one.ages) // 2 :]]
        age = statistics.fmean(ages) if ages else 0.0
        return cls(tuned.arm, where, tuned.tried, tuned.inside, [one.losses for one in curves], age)

    @property
    def label(self) -> str:
        return f"{self.arm.name}, {self.where}" if self.arm.damping is not None else self.arm.name

    @property
    def finals(self) -> list[float]:
        return [final(Curve(one, [])) for one in self.losses]

    def steps_to(self, goal: Finalist) -> list[int | None]:
        """The steps until as many losses as of `final` have the mean of another arm's; None: never."""

        def until(losses: list[float], target: float) -> int | None:
            ends = range(LAST, len(losses) + 1)
            return next((end for end in ends if statistics.fmean(losses[end - LAST : end]) <= target), None)

        return [until(own, target) for own, target in zip(self.losses, goal.finals, strict=True)]


@dataclass(frozen=True)
class Study:
    """A job, and the plans with which its arms train.

    Attributes:
        tables: of the run file, `[model]` and `[task]`.
        samples: of a step.
        micro_batch: of pipelines; one process takes all samples at once.
        every: the most steps of a window, and those between two inversions in one process.
        cluster: what plans are for.
        tuned_on: the ranks that tune arms with K-FAC.
    """

    job: Job
    tables: dict[str, dict[str, Any]]
    samples: int
    micro_batch: int
    every: int
    cluster: Path
    tuned_on: int = 1

    def plan(self, arm: Arm, ranks: int, steps: int) -> PlannedJob:
        """The plan of an arm: of one process, or of a 1F1B pipeline with K-FAC in its bubbles."""
        pipeline = {"schedule": "1f1b", "micro_batch_size": self.micro_batch}
        tables: dict[str, dict[str, Any]] = {
            **self.tables,
            "train": {"global_batch": self.samples, "steps": steps},
            "optimizer": {"name": arm.optimizer},
            "cluster": {"use": str(self.cluster)},
            "plan": {
                "pp": ranks,
                "dp": 1,
                "tp": 1,
                **(pipeline if ranks > 1 else {"micro_batch_size": self.samples}),
            },
            **({} if arm.damping is None else {"kfac": {"every": self.every}}),
        }
        if ranks > 1:
            bubble = {"work": ["kfac"], "most_steps": self.every}
            tables |= {"goal": {"contract": "empirical"}, "bubble": bubble}
        return planned(tables)

    def _tuned(self, grid: Grid, effort: Effort, alone: Sequence[Ranks]) -> Tuned:
        arm, ranks = next(grid.points()), self.tuned_on if grid.dampings else 1
        plan = self.plan(arm, ranks, effort.steps).plan
        if ranks == 1:
            return tune(grid, plan, effort, alone)
        with Ranks(self.job, ranks) as together:
            return tune(grid, plan, effort, [together])

    def run(self, grids: Sequence[Grid], effort: Effort) -> list[Finalist]:
        """Tune all arms, and train the finalists."""
        found: list[Finalist] = []
        best: list[Tuned] = []
        with ExitStack() as stack:
            alone = [stack.enter_context(Ranks(self.job, 1)) for _ in range(effort.processes)]
            for grid in grids:
                plan = self.plan(next(grid.points()), 1, effort.steps).plan
                tuned = self._tuned(grid, effort, alone)
                best.append(tuned)
                curves = train_beside(alone, tuned.reported(plan, effort))
                found.append(Finalist.of(tuned, "one process", curves))
                print(f"{found[-1].label}: {spread(found[-1].finals, 4)}", flush=True)
        for ranks in effort.pipelines:
            with Ranks(self.job, ranks) as together:
                for tuned in best:
                    if tuned.arm.damping is not None:
                        job = self.plan(tuned.arm, ranks, effort.steps)
                        curves = together.train(tuned.reported(job.plan, effort))
                        found.append(Finalist.of(tuned, f"{ranks} ranks", curves))
                        print(f"{found[-1].label}: {'; '.join(decided_words(job))}", flush=True)
        return found


def spread(values: Sequence[float | int | None], digits: int) -> str:
    known = [NO_LOSS if one is None else one for one in values]
    if max(known) == NO_LOSS:
        reached = sum(one < NO_LOSS for one in known)
        return "never" if reached == 0 else f"{reached} of {len(known)} seeds"
    low, middle, high = (f"{one:.{digits}f}" for one in (min(known), statistics.fmean(known), max(known)))
    return f"{middle} ({low} to {high})"


def table(found: Sequence[Finalist], goals: Sequence[Finalist]) -> Iterator[str]:
    """A line for each arm: its point, final loss, steps to the final losses of goals, and age."""
    heads = ["arm", "rate", "damping", "loss", *(f"steps to {one.arm.name}'s" for one in goals), "age"]
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for one in found:
        damping = "" if one.arm.damping is None else f"{one.arm.damping:g}"
        border = "" if one.inside else ", at the border"
        cells = [
            one.label,
            f"{one.arm.rate:g}{border}",
            damping,
            spread(one.finals, 4),
            *(spread(one.steps_to(goal), 0) for goal in goals),
            "" if one.arm.damping is None else f"{one.age:.1f}",
        ]
        yield "| " + " | ".join(cells) + " |"


def curve_lines(found: Sequence[Finalist], points: int = 8) -> Iterator[str]:
    """Mean losses of each arm at some steps."""
    steps = len(found[0].losses[0])
    places = sorted({steps * place // points for place in range(points)} | {steps - 1})
    yield "| mean loss before step | " + " | ".join(map(str, places)) + " |"
    yield "|" + "---|" * (1 + len(places))
    for one in found:
        means = (statistics.fmean(own[place] for own in one.losses) for place in places)
        yield f"| {one.label} | " + " | ".join(f"{mean:.4f}" for mean in means) + " |"


def losses_to_one_process(found: Sequence[Finalist]) -> Iterator[str]:
    """The final losses of pipelines less those of one process, seed by seed."""
    for one in found:
        if one.where != "one process":
            serial = next(other for other in found if other.arm == one.arm and other.where == "one process")
            apart = [own - other for own, other in zip(one.finals, serial.finals, strict=True)]
            yield f"{one.label}, to one process by seed: {spread(apart, 4)}"


def report(found: Sequence[Finalist], goals: Sequence[str]) -> Iterator[str]:
    """All tables; `goals` are the first-order arms whose final losses others reach."""
    reached = [one for name in goals for one in found if one.arm.name == name]
    yield from (*table(found, reached), "", *curve_lines(found), "", *losses_to_one_process(found))


def as_json(found: Sequence[Finalist]) -> list[dict[str, Any]]:
    return [asdict(one) | {"finals": one.finals} for one in found]
