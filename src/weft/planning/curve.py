"""Comparison of methods by the batch per device: the best fitting layout of each, over samples per device.

Large clusters need small batches per device (`weft.predict.trade_off`). There orders of micro-batches differ
most: Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv 2211.05953.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.plan import Blocking, Sharding
from weft.errors import InputError, Violation
from weft.planning.planners import Candidate, Verdict
from weft.planning.planners.homogeneous import HomogeneousPlanner
from weft.planning.problem import Problem
from weft.planning.throughput import model_flops_utilisation
from weft.predict.trade_off import TradeOff, cheapest, critical_batch_tokens
from weft.progress import CountedWork, ProgressReport, unwatched


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One line of the curve: an order of micro-batches, and its execution.

    Attributes:
        name: the name in tables.
        schedule: its schedule.
        looped: with several stages per device, or with one.
        pipelined: over several devices, or layer by layer on one.
        blocking: communication that does not overlap computation.
        sharding: the only sharding; None leaves it to the planner.
    """

    name: str
    schedule: str
    looped: bool = False
    pipelined: bool = True
    blocking: tuple[Blocking, ...] = ()
    sharding: Sharding | None = None

    def admits(self, layout: Layout) -> bool:
        """Return True if a layout of the schedule is one of the method."""
        if not self.pipelined:
            return layout.pp == 1
        return layout.pp > 1 and (layout.loops > 1) == self.looped

    def loops(self, job: Job) -> tuple[int | None, ...]:
        """Return the numbers of stages per device to pin; None leaves them to the planner. Without a pipeline
        the stages are the units that sharded weights are gathered by, up to one layer each."""
        if self.pipelined:
            return (None if self.looped else 1,)
        layers = len(job.graph.layers)
        return tuple(1 << power for power in range(layers.bit_length()))


def _as_shipped(method: Method) -> Method:
    """Return the method as Megatron-LM first shipped it (Narayanan et al., arXiv 2104.04473)."""
    return replace(
        method,
        name=f"{method.name} as shipped",
        blocking=("messages", "reductions"),
        sharding="zero-0",
    )


BREADTH_FIRST = Method(name="breadth-first", schedule="breadth-first", looped=True)
DEPTH_FIRST = Method(name="depth-first", schedule="depth-first", looped=True)
ONE_FORWARD_ONE_BACKWARD = Method(name="1f1b", schedule="1f1b")
GPIPE = Method(name="gpipe", schedule="gpipe")
# Each layer runs all its micro-batches before the next one does, so it is gathered once in a pass.
NO_PIPELINE = Method(name="no pipeline", schedule="breadth-first", pipelined=False)
# The rivals of breadth-first: each with its communication overlapped, and as it was shipped.
RIVALS = {
    DEPTH_FIRST: _as_shipped(DEPTH_FIRST),
    ONE_FORWARD_ONE_BACKWARD: _as_shipped(ONE_FORWARD_ONE_BACKWARD),
}
METHODS = (BREADTH_FIRST, DEPTH_FIRST, ONE_FORWARD_ONE_BACKWARD, GPIPE, NO_PIPELINE, *RIVALS.values())


MOST_SAMPLES_PER_DEVICE = 4.0
MOST_DOUBLINGS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The best layout of a method at a batch per device; `candidate` is None where none fits. `reason`
    explains the place of the layout, or why none fits."""

    method: Method
    samples_per_device: float
    reason: str
    candidate: Candidate | None = None
    utilisation: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of the best layout's step; not a number where none fits."""
        return float("nan") if self.candidate is None else self.candidate.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The best layouts of all methods; `points` is sorted by method, then by samples per device."""

    problem: Problem
    points: tuple[CurvePoint, ...]

    @property
    def methods(self) -> tuple[Method, ...]:
        return tuple(dict.fromkeys(point.method for point in self.points))

    @property
    def samples_per_device(self) -> tuple[float, ...]:
        return tuple(sorted({point.samples_per_device for point in self.points}))

    def point(self, method: str, samples_per_device: float) -> CurvePoint:
        """Return the point of the method with this name."""
        return next(
            point
            for point in self.points
            if (point.method.name, point.samples_per_device) == (method, samples_per_device)
        )

    def best(self, samples_per_device: float) -> CurvePoint:
        """Return the point with the highest utilisation at a batch per device."""
        here = (point for point in self.points if point.samples_per_device == samples_per_device)
        return max(here, key=lambda point: point.utilisation)

    def utilisation(self, method: str) -> Mapping[float, float]:
        """Return U(beta) of a method, where something fits."""
        return {
            point.samples_per_device: point.utilisation
            for point in self.points
            if point.method.name == method and point.candidate is not None
        }

    def trade_offs(self, method: str, devices: Sequence[int], critical_batch: float) -> tuple[TradeOff, ...]:
        """Return time against cost on larger clusters: the data-parallel degree grows, all else stays.

        Raises:
            InputError: when no layout of the method fits.
        """
        utilisation = self.utilisation(method)
        return tuple(cheapest(utilisation, count, critical_batch) for count in devices)


def curve(
    problem: Problem,
    *,
    samples_per_device: Sequence[float] | None = None,
    methods: Sequence[Method] = METHODS,
    report: ProgressReport = unwatched,
) -> Curve:
    """Return the best fitting layout of each method at each batch per device; the problem's batch does not
    count.

    Args:
        problem: the job and the user's pins, which hold for every method.
        samples_per_device: beta, samples of one step over devices; default: `default_samples_per_device`.
        methods: the methods to compare.
        report: gets the number of searches that are done, of all.

    Raises:
        InputError: when a batch is no whole number of samples, or a schedule is pinned.
    """
    shares = tuple(samples_per_device or default_samples_per_device(problem.job))
    _require_possible(problem, shares)
    asked = [(method, share) for method in methods for share in sorted(shares)]
    counted = CountedWork(report, "curve", len(asked), "searches")
    points = tuple(_point(problem, method, share) for method, share in counted.each(asked))
    return Curve(problem=problem, points=points)


def default_samples_per_device(job: Job) -> tuple[float, ...]:
    """Return powers of two up to 4, from one sample per node, the fewest that tensor ranks can share."""
    share = 1.0 / max(group.devices for group in job.cluster.groups)
    shares = []
    while share <= MOST_SAMPLES_PER_DEVICE:
        if share * job.cluster.ranks % 1 == 0:
            shares.append(share)
        share *= 2.0
    return tuple(shares)


def default_cluster_sizes(job: Job) -> tuple[int, ...]:
    """Return the numbers of devices to extrapolate to: the cluster's own, times 1, 2, 4, ... 1024."""
    return tuple(job.cluster.ranks << doublings for doublings in range(MOST_DOUBLINGS + 1))


def default_critical_batch(job: Job) -> float:
    """Return B_crit in samples, by the model's size: see `critical_batch_tokens`."""
    return critical_batch_tokens(job.graph.parameters()) / job.sequence


@dataclass(frozen=True)
class MethodPlanner(HomogeneousPlanner):
    """The homogeneous planner, restricted to the layouts of one method."""

    finalists: int = 1
    method: Method = BREADTH_FIRST

    def space(self, problem: Problem) -> Iterator[Layout]:
        for loops in self.method.loops(problem.job):
            if problem.pins.loops not in (None, loops) and loops is not None:
                continue
            pins = problem.pins.replaced(schedule=self.method.schedule, loops=loops or problem.pins.loops)
            if not self.method.pipelined:
                pins = pins.replaced(pp=pins.pp or 1)
            if self.method.sharding is not None:
                pins = pins.replaced(sharding=self.method.sharding)
            yield from (
                replace(layout, blocking=self.method.blocking)
                for layout in super().space(replace(problem, pins=pins))
                if self.method.admits(layout)
            )


def job_of(problem: Problem, samples_per_device: float) -> Job:
    """Return the problem's job with a batch of these samples per device."""
    return replace(problem.job, global_batch=round(samples_per_device * problem.job.cluster.ranks))


def _point(problem: Problem, method: Method, samples_per_device: float) -> CurvePoint:
    job = job_of(problem, samples_per_device)
    ranking = MethodPlanner(method=method).search(replace(problem, job=job))
    return point_of(job, method, samples_per_device, ranking.candidates)


def point_of(
    job: Job, method: Method, samples_per_device: float, candidates: Sequence[Candidate]
) -> CurvePoint:
    """Return a method's point: the first of the candidates, if it fits."""
    reason = "no layout satisfies the given degrees"
    point = CurvePoint(method=method, samples_per_device=samples_per_device, reason=reason)
    if not candidates:
        return point
    best = candidates[0]
    if best.verdict is not Verdict.FITS:
        return replace(point, reason=f"{best.words}: {best.reason}")
    point = replace(point, reason=best.reason, candidate=best)
    # Of all devices, also of those that the layout leaves idle.
    utilisation = model_flops_utilisation(job, job.cluster.ranks, point.step_s)
    return replace(point, utilisation=utilisation)


def _require_possible(problem: Problem, shares: Sequence[float]) -> None:
    ranks = problem.job.cluster.ranks
    violations = [
        Violation(
            "samples per device",
            f"{share:g} on {ranks} devices is {share * ranks:g} samples; a whole number is needed",
            f"{max(1, round(share * ranks)) / ranks:g}",
        )
        for share in shares
        if share <= 0 or share * ranks % 1
    ]
    if problem.pins.schedule is not None:
        violations.append(
            Violation("schedule", f"{problem.pins.schedule!r} is pinned; the curve compares schedules")
        )
    if problem.pins.blocking is not None:
        words = " and ".join(problem.pins.blocking) or "nothing"
        violations.append(
            Violation("blocking", f"{words} is pinned; the curve compares programs that wait and that do not")
        )
    if violations:
        raise InputError(violations)
