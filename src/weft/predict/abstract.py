"""A schedule on abstract stages: durations are exact fractions, and nothing else has a cost.

`forward` and `backward` are for one micro-batch through ALL local stages of a device. A stage takes a v-th
part on a device with v stages. `hop` is the pure latency of one crossing from stage to stage. `weight_share`
is the weight gradient's part of a backward. The notation follows Lamy-Poirier, arXiv 2211.05953. Unequal
stages have a forward and a backward time each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np

from weft.describe.reading import read_text
from weft.errors import InputError, Violation
from weft.predict.costs import Costs
from weft.predict.simulator import Simulation, simulate
from weft.program.buffers import SHARDED_BUFFERS, gathers, reductions
from weft.program.build import build_training_program, program_orders
from weft.program.kinds import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTATIONS,
    FORWARD,
    KINDS,
    is_send,
)
from weft.program.layout import PipelineLayout, StageLayout
from weft.program.program import NONE, Program
from weft.program.schedules import get_schedule
from weft.program.schedules.base import Options, Pipeline, placements
from weft.timeline.figures import busy_by_kind, peak_in_flight
from weft.timeline.timeline import Timeline

Number = int | float | str | Fraction

COLUMNS = ["forward", "backward"]


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Times of one micro-batch on one stage: forward, and backward with its weight gradient."""

    forward: Fraction
    backward: Fraction


def exact(where: str, value: Number, *, zero: bool = False) -> Fraction:
    """Return the time as a fraction; a decimal keeps its typed value.

    Raises:
        InputError: for a time that is not finite, is negative, or is zero unless `zero` is True.
    """
    try:
        # str of a float is the decimal the user typed, not the binary fraction next to it.
        time = Fraction(str(value) if isinstance(value, float) else value)
    except (ValueError, ZeroDivisionError):
        raise InputError(Violation(where, f"{value!r} is not a finite time")) from None
    if time < 0 or (time == 0 and not zero):
        raise InputError(Violation(where, f"{value} must be {'0 or more' if zero else 'more than 0'}"))
    return time


def read_stage_times(path: Path) -> tuple[PassTimes, ...]:
    """Read a CSV file with the heading `forward,backward` and one row per stage, first stage first.

    Raises:
        InputError: naming every wrong line.
    """
    rows = [line.split(",") for line in read_text(path).splitlines()]
    heading = [word.strip().lower() for word in rows[0]] if rows else []
    if heading != COLUMNS:
        given = ",".join(heading) or "nothing"
        raise InputError(Violation(f"{path}, line 1", f"{given!r} is not the heading", ",".join(COLUMNS)))
    problems: list[Violation] = []
    stages: list[PassTimes] = []
    for line, row in enumerate(rows[1:], start=2):
        where = f"{path}, line {line}"
        if len(row) != len(COLUMNS):
            problems.append(Violation(where, f"has {len(row)} values; a stage has {len(COLUMNS)}"))
            continue
        times = []
        for name, value in zip(COLUMNS, row, strict=True):
            try:
                times.append(exact(f"{where}, {name}", value.strip()))
            except InputError as error:
                problems += error.violations
        if len(times) == len(COLUMNS):
            stages.append(PassTimes(*times))
    if not problems and not stages:
        problems.append(Violation(str(path), "has no stage; one row per stage is needed"))
    if problems:
        raise InputError(problems)
    return tuple(stages)


# Longest simulated time in ticks; the sum of two such times still fits into 64 bits.
MOST_TICKS = 2**62


@dataclass(frozen=True, kw_only=True)
class ScheduleFigures:
    """One isolated step of a schedule, in the unit of the given durations.

    `makespan` and `ideal` (the busiest device's computation without any wait) are exact. `loops` is the
    largest number of stages on a device.
    """

    makespan: Fraction
    ideal: Fraction
    bubble_fraction: float
    peak_in_flight: tuple[int, ...]
    breakdown: Mapping[str, float]
    program: Program
    simulation: Simulation
    loops: int

    @property
    def timeline(self) -> Timeline:
        return self.simulation.timeline

    @property
    def bubble_overhead(self) -> float:
        """makespan / ideal - 1."""
        return float(self.makespan / self.ideal - 1)

    def record(self, *, dump: bool = False) -> dict[str, Any]:
        """Return the JSON answer of `weft schedule`; with `dump`, `instructions` is a list, else a count.

        `gathers` and `reduces` count rank 0's operations per step with fully sharded states and two buffers.
        """
        first = program_orders(self.program)[0]
        return {
            "gathers": len(gathers(first, SHARDED_BUFFERS)),
            "reduces": len(reductions(first, SHARDED_BUFFERS)),
            "makespan_s": float(self.makespan),
            "bubble_fraction": self.bubble_fraction,
            "bubble_overhead": self.bubble_overhead,
            "peak_in_flight": list(self.peak_in_flight),
            "instructions": self._instructions() if dump else self.simulation.instructions,
            "breakdown": dict(self.breakdown),
            "simulate_s": self.simulation.simulate_s,
        }

    def _instructions(self) -> list[dict[str, Any]]:
        """Return every instruction with its times, by rank, in issue order of the host."""
        timeline, columns = self.timeline, self.program.columns
        times = {"start_s": timeline.start_ns, "end_s": timeline.end_ns}
        rows = timeline.position
        listed = {"stage": columns.stage, "micro_batch": columns.micro_batch, "peer": columns.peer}
        return [
            {
                "id": f"{int(timeline.id[row]):016x}",
                "kind": KINDS[int(timeline.kind[row])].name,
                "rank": int(timeline.rank[row]),
                **{
                    name: int(column[rows[row]])
                    for name, column in listed.items()
                    if column[rows[row]] != NONE
                },
                **{name: float(time[row]) / 1e9 for name, time in times.items()},
            }
            for row in range(len(timeline))
        ]


def simulate_schedule(
    name: str,
    *,
    devices: int,
    loops: int | None = None,
    micro_batches: int,
    forward: Number | None = None,
    backward: Number | None = None,
    hop: Number = 0,
    weight_share: Number = "1/2",
    stage_times: Sequence[PassTimes] | None = None,
    frozen_stages: int = 0,
    options: Options | None = None,
    edges: Sequence[tuple[int, int]] | None = None,
    copies: Sequence[int] | None = None,
) -> ScheduleFigures:
    """Simulate one isolated step, without optimizer and data-parallel traffic.

    Stages are uniform; defaults are 1 loop, forward 1 and backward 2. `stage_times` gives one time per stage
    and replaces `loops`, `forward` and `backward`. `weight_share` matters only to schedules that split the
    backward. The first `frozen_stages` stages are not trained. `edges` are those of the stage graph; without
    them, stages form a chain. `copies` are the replicas of each stage, one stage per device; without them,
    each has one.

    Raises:
        InputError: for an unknown schedule or option, counts below one, negative or unreadable times, or a
            pipeline that the schedule refuses.
    """
    schedule = get_schedule(name)
    times = _Times.read(devices, loops, micro_batches, forward, backward, hop, weight_share, stage_times)
    options = options or {}
    pipeline = Pipeline(devices, len(times.stages), micro_batches, None if edges is None else tuple(edges))
    reason = schedule.refuse(pipeline, options)
    if reason is not None:
        raise InputError(Violation(f"schedule {name}", reason))
    devices_of_stages = placements(schedule, pipeline).T.tolist()
    if copies is not None:
        ranks = iter(range(sum(copies)))
        devices_of_stages = [[next(ranks) for _ in range(count)] for count in copies]
    paths = lcm(*map(len, devices_of_stages))
    layout = PipelineLayout(
        stages=tuple(
            StageLayout(replicas=tuple((device,) for device in devices_of))
            for devices_of in devices_of_stages
        ),
        micro_batches=(micro_batches // paths,) * paths,
        message_bytes=dict.fromkeys(pipeline.stage_edges, 1),
        paths=paths,
        frozen_stages=frozen_stages,
    )
    program = build_training_program(layout, schedule, options)
    ticks_per_unit = lcm(*(time.denominator for time in times.all()))
    costs, computation = _costs(program, times, ticks_per_unit)
    simulation = simulate(program, costs, max_cycles=1)
    makespan = Fraction(simulation.first_step_ticks, ticks_per_unit)
    total = sum(computation, Fraction(0))
    return ScheduleFigures(
        makespan=makespan,
        ideal=max(computation),
        bubble_fraction=float(1 - total / (layout.ranks * makespan)),
        peak_in_flight=tuple(peak_in_flight(program)),
        breakdown=busy_by_kind(simulation.timeline),
        program=program,
        simulation=simulation,
        loops=pipeline.loops,
    )


@dataclass(frozen=True, slots=True)
class _Times:
    """Exact times of every stage and of a crossing; `weight_share` is the weight part of a backward."""

    stages: tuple[PassTimes, ...]
    weight_share: Fraction
    hop: Fraction

    @classmethod
    def read(
        cls,
        devices: int,
        loops: int | None,
        micro_batches: int,
        forward: Number | None,
        backward: Number | None,
        hop: Number,
        weight_share: Number,
        stage_times: Sequence[PassTimes] | None,
    ) -> _Times:
        """Return checked times; raise one InputError for all counts and times that no pipeline has."""
        counts = {"ranks": devices, "loops": 1 if loops is None else loops, "micro-batches": micro_batches}
        problems = [
            Violation(where, f"{count} is not a count of at least 1", "1")
            for where, count in counts.items()
            if count < 1
        ]
        uniform = {"loops": loops, "forward": forward, "backward": backward}
        if stage_times is not None:
            problems += [
                Violation(where, f"{value} was given, but the stage times say it already")
                for where, value in uniform.items()
                if value is not None
            ]
            if not stage_times:
                problems.append(Violation("stage times", "name no stage; one per stage is needed"))
        given = {
            "forward": 1 if forward is None else forward,
            "backward": 2 if backward is None else backward,
            "hop": hop,
            "weight share": weight_share,
        }
        times: dict[str, Fraction] = {}
        for where, value in given.items():
            try:
                times[where] = exact(where, value, zero=where == "hop")
            except InputError as error:
                problems += error.violations
        if times.get("weight share", Fraction(0)) >= 1:
            problems.append(Violation("weight share", f"{weight_share} must be less than 1", "0.5"))
        if problems:
            raise InputError(problems)
        one = PassTimes(times["forward"] / counts["loops"], times["backward"] / counts["loops"])
        stages = (one,) * (devices * counts["loops"]) if stage_times is None else tuple(stage_times)
        return cls(stages, times["weight share"], times["hop"])

    def of(self, kind: int) -> list[Fraction]:
        """Return the time of a kind of computation on each stage."""
        share = {
            BACKWARD: Fraction(1),
            BACKWARD_INPUT: 1 - self.weight_share,
            BACKWARD_WEIGHT: self.weight_share,
        }
        if kind == FORWARD:
            return [stage.forward for stage in self.stages]
        return [share[kind] * stage.backward for stage in self.stages]

    def all(self) -> list[Fraction]:
        return [self.hop, *(time for kind in COMPUTATIONS for time in self.of(kind))]


def _costs(program: Program, times: _Times, ticks_per_unit: int) -> tuple[Costs, list[Fraction]]:
    """Return costs in exact ticks, and each rank's computation in units."""
    if len(program) * max(times.all()) * ticks_per_unit > MOST_TICKS:
        problem = "have no common unit small enough; use rounder numbers"
        raise InputError(Violation("forward, backward, hop, weight share", problem))
    columns = program.columns
    ticks = np.zeros((len(KINDS), len(times.stages)), dtype=np.int64)
    for kind in COMPUTATIONS:
        ticks[kind] = [int(time * ticks_per_unit) for time in times.of(kind)]
    occupancy = ticks[columns.kind, columns.stage]
    busy = np.zeros(program.ranks, dtype=np.int64)
    np.add.at(busy, columns.rank, occupancy)
    sends = is_send(columns.kind)
    costs = Costs(
        occupancy=occupancy,
        latency=np.where(sends, int(times.hop * ticks_per_unit), 0),
        tick_s=1 / ticks_per_unit,
        synchronous=np.zeros(program.ranks, dtype=np.bool_),
        live_bytes=np.zeros(len(program), dtype=np.int64),
        base_bytes=np.zeros(program.ranks, dtype=np.int64),
    )
    return costs, [Fraction(value, ticks_per_unit) for value in busy.tolist()]
