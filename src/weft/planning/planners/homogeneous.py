"""The `homogeneous` planner: pp x dp layouts of equal replicas, micro-batch size, schedule and loops.

Layouts are bounded from below in closed form, sorted by that bound and simulated best first, until no
unsimulated layout can be among the best `finalists`. Every layout looked at is answered for: it fits, it is
too big (by how much), it was pruned (by which bound) or it was refused (why).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

from weft.describe.amount import Shape
from weft.describe.layer_graph import Layer
from weft.describe.units import format_bytes, format_seconds
from weft.errors import InputError
from weft.moves.layout import Job, Layout, build_plan, pipeline_of, refuse
from weft.moves.partition import balanced_partition
from weft.planning.compile import compile_plan
from weft.planning.planners.base import Candidate, Ranking, Verdict
from weft.planning.problem import Pins, Problem
from weft.predict.cost.compute import ComputeModel
from weft.predict.cost.memory import stage_parameters, state_bytes
from weft.predict.predict import predict
from weft.program.kinds import BACKWARD_INPUT
from weft.program.schedules import SCHEDULES, get_schedule
from weft.program.schedules.base import Pipeline
from weft.timeline.figures import bubble_fraction

# With one device in line all orders compute the same things; 1f1b keeps the least.
SINGLE_DEVICE_SCHEDULE = "1f1b"
MAX_LOOPS = 8


@dataclass(frozen=True, slots=True)
class HomogeneousPlanner:
    """Search over homogeneous layouts; `finalists` is how many fitting layouts are simulated at least."""

    name: ClassVar[str] = "homogeneous"
    finalists: int = 8

    def space(self, problem: Problem) -> Iterator[Layout]:
        """Mesh x micro-batch size x schedule x loops, restricted by the user's pins."""
        for pipeline_parallel, data_parallel in _meshes(problem.job.cluster.ranks, problem.pins):
            for micro_batch_size in _micro_batch_sizes(problem.job, data_parallel, problem.pins):
                for schedule in _schedules(pipeline_parallel, problem.pins):
                    for loops in _loops(problem.job, pipeline_parallel, schedule, problem.pins):
                        yield Layout(
                            pipeline_parallel=pipeline_parallel,
                            data_parallel=data_parallel,
                            loops=loops,
                            micro_batch_size=micro_batch_size,
                            schedule=schedule,
                            sync=problem.pins.sync,
                        )

    def search(self, problem: Problem) -> Ranking:
        """Judge every layout of the space; see the module's docstring.

        Raises:
            InputError: when a pin names an unknown schedule.
        """
        judged: list[Candidate] = []
        waiting: list[Candidate] = []
        bounds = _Bounds(problem)
        for layout in self.space(problem):
            answer = self._first_look(problem, layout, bounds)
            (waiting if answer.verdict is Verdict.PRUNED else judged).append(answer)
        waiting.sort(key=lambda candidate: (candidate.bound_s, str(candidate.layout)))
        fitting: list[float] = []
        for candidate in waiting:
            worst = sorted(fitting)[self.finalists - 1] if len(fitting) >= self.finalists else None
            if worst is not None and candidate.bound_s > worst:
                reason = f"cannot beat {format_seconds(worst)}: at least {format_seconds(candidate.bound_s)}"
                judged.append(replace(candidate, reason=reason))
                continue
            answered = _simulate(problem, candidate, bounds.layer_seconds(candidate.layout))
            if answered.verdict is Verdict.FITS and answered.plan is not None:
                assert answered.plan.prediction is not None
                fitting.append(answered.plan.prediction.step_s)
            judged.append(answered)
        return Ranking(problem=problem, candidates=tuple(sorted(judged, key=_rank_key(problem))))

    def _first_look(self, problem: Problem, layout: Layout, bounds: _Bounds) -> Candidate:
        """Refused, too big by its states alone, or worth simulating (`PRUNED` until it is)."""
        reason = refuse(problem.job, layout)
        if reason is not None:
            return Candidate(layout=layout, verdict=Verdict.REFUSED, reason=reason)
        try:
            bound_s = bounds.step_s(layout)
        except InputError as error:
            # A profile that was not measured at this micro-batch size refuses to guess.
            return Candidate(layout=layout, verdict=Verdict.REFUSED, reason=str(error.violations[0]))
        over = bounds.state_bytes(layout) - bounds.largest_memory_bytes
        if over > 0:
            reason = f"parameters and optimizer alone need {format_bytes(over)} more than any device has"
            return Candidate(layout=layout, verdict=Verdict.TOO_BIG, reason=reason, bound_s=bound_s)
        return Candidate(layout=layout, verdict=Verdict.PRUNED, reason="", bound_s=bound_s)


class _Bounds:
    """Lower bounds of step times and of memory, from layers evaluated once per micro-batch size."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._seconds: dict[int, list[tuple[float, float]]] = {}
        self._partitions: dict[tuple[int, int], list[list[int]]] = {}
        self._fastest = min(
            (group.device for group in problem.job.cluster.groups),
            key=lambda device: -device.flops_per_s.get(problem.job.precision, 0.0),
        )
        self._compute = ComputeModel(machine=problem.machine, profile=problem.profile)

    def layer_seconds(self, layout: Layout) -> list[float]:
        return [forward + backward for forward, backward in self._passes(layout.micro_batch_size)]

    def step_s(self, layout: Layout) -> float:
        """Valid for every order: some device must wait for the stages before its first one to fill, run all
        its micro-batches, and then wait for these stages to drain. Weight parts of its own that are left may
        hide the drain."""
        pipeline = pipeline_of(self._problem.job, layout)
        placement = get_schedule(layout.schedule).placement(pipeline)
        passes = self._passes(layout.micro_batch_size)
        parts = self._parts(layout)
        stage_seconds = [sum(sum(passes[layer]) for layer in part) for part in parts]
        waits = stage_seconds
        if _splits_backward(layout.schedule, layout.pipeline_parallel):
            waits = [sum(passes[layer][0] for layer in part) for part in parts]
        bound = 0.0
        for device in range(pipeline.devices):
            mine = [stage for stage in range(pipeline.stages) if placement[stage] == device]
            work = pipeline.micro_batches * sum(stage_seconds[stage] for stage in mine)
            bound = max(bound, work + sum(waits[: mine[0]]))
        return bound

    @property
    def largest_memory_bytes(self) -> int:
        return max(group.device.memory_bytes for group in self._problem.job.cluster.groups)

    def state_bytes(self, layout: Layout) -> int:
        """The most that a device of this layout holds in parameters, gradients and optimizer state."""
        job = self._problem.job
        shape = Shape(layout.micro_batch_size, job.sequence)
        pipeline = pipeline_of(job, layout)
        placement = get_schedule(layout.schedule).placement(pipeline)
        held = [0] * pipeline.devices
        for stage, part in enumerate(self._parts(layout)):
            held[placement[stage]] += stage_parameters(job.graph, part, shape)
        return max(held) * state_bytes(job.precision).total

    def _parts(self, layout: Layout) -> list[list[int]]:
        key = (layout.micro_batch_size, layout.stages)
        if key not in self._partitions:
            self._partitions[key] = balanced_partition(self.layer_seconds(layout), layout.stages)
        return self._partitions[key]

    def _passes(self, micro_batch_size: int) -> list[tuple[float, float]]:
        if micro_batch_size not in self._seconds:
            job = self._problem.job
            shape = Shape(micro_batch_size, job.sequence)
            known: dict[Layer, tuple[float, float]] = {}
            rows = []
            for index, layer in enumerate(job.graph.layers):
                # Layers that differ only in their name cost the same.
                key = replace(layer, name="")
                if key not in known:
                    times = self._compute.stage_times(
                        job.graph, (index,), shape, job.precision, self._fastest
                    )
                    known[key] = (times.forward_s, times.backward_input_s + times.backward_weight_s)
                rows.append(known[key])
            self._seconds[micro_batch_size] = rows
        return self._seconds[micro_batch_size]


def _simulate(problem: Problem, candidate: Candidate, layer_seconds: list[float]) -> Candidate:
    job = problem.job
    plan = build_plan(job, candidate.layout, layer_seconds)
    program = compile_plan(plan, job.graph, only_replica=0)
    predicted = predict(
        plan, program, job.graph, job.cluster, machine=problem.machine, profile=problem.profile
    )
    plan = plan.model_copy(update={"prediction": predicted.prediction})
    peak = max(predicted.prediction.peak_bytes)
    short = [
        (held - job.cluster.device_of(rank).memory_bytes, rank)
        for rank, held in enumerate(predicted.prediction.peak_bytes)
    ]
    over, rank = max(short)
    if over > 0:
        reason = f"rank {rank} would need {format_bytes(over)} more than its device has"
        verdict = Verdict.TOO_BIG
    else:
        waiting = bubble_fraction(predicted.simulation.timeline)
        verdict, reason = Verdict.FITS, _why(problem, candidate.layout, waiting)
    return replace(candidate, verdict=verdict, reason=reason, peak_bytes=peak, plan=plan)


def _why(problem: Problem, layout: Layout, waiting: float) -> str:
    pipeline = pipeline_of(problem.job, layout)
    count = pipeline.micro_batches
    each = f"{count} micro-batch{'es' if count > 1 else ''} per replica"
    if pipeline.devices == 1:
        return f"{each}, no pipeline"
    return f"{each}, devices wait {waiting:.0%} of the step"


def _rank_key(problem: Problem) -> Callable[[Candidate], tuple[float, ...]]:
    order = {Verdict.FITS: 0, Verdict.TOO_BIG: 1, Verdict.PRUNED: 2, Verdict.REFUSED: 3}

    def key(candidate: Candidate) -> tuple[float, ...]:
        prediction = candidate.plan.prediction if candidate.plan is not None else None
        step_s = prediction.step_s if prediction is not None else candidate.bound_s
        first = candidate.peak_bytes if problem.minimise == "memory" else 0
        return (order[candidate.verdict], first, step_s, candidate.peak_bytes)

    return key


def _meshes(ranks: int, pins: Pins) -> Iterator[tuple[int, int]]:
    """(pp, dp) with pp x dp = ranks; fewer ranks only when the user pins both degrees."""
    if pins.pipeline_parallel is not None and pins.data_parallel is not None:
        yield pins.pipeline_parallel, pins.data_parallel
        return
    for pipeline_parallel in range(1, ranks + 1):
        if ranks % pipeline_parallel:
            continue
        data_parallel = ranks // pipeline_parallel
        if pins.pipeline_parallel in (None, pipeline_parallel) and pins.data_parallel in (
            None,
            data_parallel,
        ):
            yield pipeline_parallel, data_parallel


def _micro_batch_sizes(job: Job, data_parallel: int, pins: Pins) -> Iterator[int]:
    """Powers of two that divide one replica's share of the batch, or the pinned size."""
    if pins.micro_batch_size is not None:
        yield pins.micro_batch_size
        return
    size = 1
    while size * data_parallel <= job.global_batch:
        if job.global_batch % (size * data_parallel) == 0:
            yield size
        size *= 2


def _schedules(pipeline_parallel: int, pins: Pins) -> Iterator[str]:
    if pins.schedule is not None:
        yield get_schedule(pins.schedule).name
    elif pipeline_parallel == 1:
        yield SINGLE_DEVICE_SCHEDULE
    else:
        yield from (name for name in SCHEDULES if not _splits_backward(name, pipeline_parallel))


@cache
def _splits_backward(name: str, pipeline_parallel: int) -> bool:
    """Whether backwards are computed in two parts, which no runtime does yet: only a pin asks for it."""
    schedule = get_schedule(name)
    probes = (Pipeline(pipeline_parallel, loops * pipeline_parallel, pipeline_parallel) for loops in (1, 2))
    return any(
        BACKWARD_INPUT in schedule.order(probe, 0, {}).kind
        for probe in probes
        if schedule.refuse(probe, {}) is None
    )


def _loops(job: Job, pipeline_parallel: int, schedule: str, pins: Pins) -> Iterator[int]:
    """One, and the powers of two that the schedule can loop and the model has layers for."""
    if pins.loops is not None:
        yield pins.loops
        return
    yield 1
    loops = 2
    while loops <= MAX_LOOPS and loops * pipeline_parallel <= len(job.graph.layers):
        looped = Pipeline(pipeline_parallel, loops * pipeline_parallel, pipeline_parallel)
        if pipeline_parallel > 1 and get_schedule(schedule).refuse(looped, {}) is None:
            yield loops
        loops *= 2
