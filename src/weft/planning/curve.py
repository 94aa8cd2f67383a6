"""Comparison of methods by the batch per device: the best fitting layout of each, over samples per device.

Large clusters need small batches per device (`weft.predict.trade_off`). There orders of micro-batches differ
most: Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv 2211.05953.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.describe.amount import Shape
from weft.describe.job import Job
from weft.describe.layout import Layout, PartialLayout
from weft.describe.plan import Sharding
from weft.errors import InputError, Violation
from weft.planning.methods import BREADTH_FIRST, METHODS, RIVALS, Method
from weft.planning.planners import Candidate, Verdict
from weft.planning.planners.homogeneous import HomogeneousPlanner
from weft.planning.problem import Problem
from weft.predict.trade_off import TradeOff, critical_batch_tokens, trade_offs

MOST_SAMPLES_PER_DEVICE = 4.0
MOST_DOUBLINGS = 10
# More finalists than any space has layouts: all that may fit are simulated.
_ALL = 1 << 30


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
        return trade_offs(self.utilisation(method), devices, critical_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The lead of breadth-first over a rival as shipped, as fractions of throughput.

    Attributes:
        rival: the method in comparison.
        samples_per_device: beta.
        schedule: the lead over the rival with communication overlapped and states sharded as far as it helps.
        implementation: the lead of that improved rival over the rival as shipped.
    """

    rival: Method
    samples_per_device: float
    schedule: float
    implementation: float

    @property
    def total(self) -> float:
        """The lead over the rival as shipped."""
        return (1.0 + self.schedule) * (1.0 + self.implementation) - 1.0


def gains(answer: Curve) -> tuple[Gain, ...]:
    """Return the gains of breadth-first over each rival where all three fit; needs all `METHODS`."""
    found: list[Gain] = []
    for rival, shipped in RIVALS.items():
        ours, overlapped, blocking = (
            answer.utilisation(method.name) for method in (BREADTH_FIRST, rival, shipped)
        )
        found.extend(
            Gain(
                rival=rival,
                samples_per_device=share,
                schedule=ours[share] / overlapped[share] - 1.0,
                implementation=overlapped[share] / blocking[share] - 1.0,
            )
            for share in answer.samples_per_device
            if share in ours and share in overlapped and share in blocking
        )
    return tuple(found)


def curve(
    problem: Problem,
    *,
    samples_per_device: Sequence[float] | None = None,
    methods: Sequence[Method] = METHODS,
) -> Curve:
    """Return the best fitting layout of each method at each batch per device; the problem's batch does not
    count.

    Args:
        problem: the job and the user's pins, which hold for every method.
        samples_per_device: beta, samples of one step over devices; default: `default_samples_per_device`.
        methods: the methods to compare.

    Raises:
        InputError: when a batch is no whole number of samples, or a schedule is pinned.
    """
    shares = tuple(samples_per_device or default_samples_per_device(problem.job))
    _require_possible(problem, shares)
    return Curve(
        problem=problem,
        points=tuple(_point(problem, method, share) for method in methods for share in sorted(shares)),
    )


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


def model_flops_utilisation(job: Job, step_s: float) -> float:
    """Return the model's floating-point operations per second over the peak of all devices, in [0, 1].
    Recomputation counts once (Chowdhery et al., PaLM, arXiv 2204.02311)."""
    shape = Shape(job.global_batch, job.sequence)
    flops = sum(layer.flops(shape) for layer in job.graph.layers)
    peak = sum(
        group.count * group.devices * group.device.flops_per_s[job.precision] for group in job.cluster.groups
    )
    return flops / (step_s * peak)


@dataclass(frozen=True)
class _MethodPlanner(HomogeneousPlanner):
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


def least_memory(problem: Problem, method: Method, samples_per_device: float) -> CurvePoint:
    """Return the fitting layout of a method with the lowest peak.

    It uses micro-batches of one sample and full recomputation, unless pinned otherwise. With replicas it
    shards states as far as the method or a pin allows. The lowest peak must be there.
    """
    pins = problem.pins.replaced(
        micro_batch_size=problem.pins.micro_batch_size or 1,
        recompute=problem.pins.recompute or "full",
    )
    job = _job(problem, samples_per_device)
    planner = _MethodPlanner(finalists=_ALL, method=replace(method, sharding=None))
    found: list[Candidate] = []
    for sharding in _least_states(method, pins):
        pinned = pins.replaced(sharding=sharding)
        found.extend(planner.search(replace(problem, job=job, pins=pinned, minimise="memory")).candidates[:1])
    found.sort(key=lambda candidate: (candidate.verdict is not Verdict.FITS, candidate.peak_bytes))
    return _best(job, method, samples_per_device, found)


def _least_states(method: Method, pins: PartialLayout) -> tuple[Sharding, ...]:
    """Return the furthest allowed sharding, and no sharding for layouts without replicas."""
    pinned = method.sharding or pins.sharding
    return ("zero-3", "zero-0") if pinned is None else (pinned,)


def _job(problem: Problem, samples_per_device: float) -> Job:
    return replace(problem.job, global_batch=round(samples_per_device * problem.job.cluster.ranks))


def _point(problem: Problem, method: Method, samples_per_device: float) -> CurvePoint:
    job = _job(problem, samples_per_device)
    ranking = _MethodPlanner(method=method).search(replace(problem, job=job))
    return _best(job, method, samples_per_device, ranking.candidates)


def _best(job: Job, method: Method, samples_per_device: float, candidates: Sequence[Candidate]) -> CurvePoint:
    """Return the first of the candidates, if it fits."""
    reason = "no layout satisfies the given degrees"
    point = CurvePoint(method=method, samples_per_device=samples_per_device, reason=reason)
    if not candidates:
        return point
    best = candidates[0]
    if best.verdict is not Verdict.FITS:
        return replace(point, reason=f"{best.words}: {best.reason}")
    point = replace(point, reason=best.reason, candidate=best)
    return replace(point, utilisation=model_flops_utilisation(job, point.step_s))


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
