"""A schedule on abstract stages: durations are exact fractions, nothing else costs anything.

`forward` and `backward` are one micro-batch through ALL local stages of a device, so that a stage of a
device with v of them takes a v-th part; `hop` is one crossing from stage to stage, pure latency. The notation
is that of Lamy-Poirier, arXiv 2211.05953.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any

import numpy as np

from weft.errors import InputError, Violation
from weft.predict.costs import Costs
from weft.predict.simulator import Simulation, simulate
from weft.program.build import build_training_program
from weft.program.kinds import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, KINDS, MESSAGES
from weft.program.layout import PipelineLayout, StageLayout
from weft.program.program import Program
from weft.program.schedules import get_schedule
from weft.program.schedules.base import Options, Pipeline
from weft.timeline.figures import busy_by_kind, peak_in_flight
from weft.timeline.timeline import Timeline

Number = int | float | str | Fraction

# Longest simulated time in ticks; sums of two such times still fit into 64 bits.
MOST_TICKS = 2**62


@dataclass(frozen=True, kw_only=True)
class ScheduleFigures:
    """One isolated step of a schedule, in the unit of the durations given.

    `makespan` and `ideal` (the busiest device's computation without any wait) are exact.
    """

    makespan: Fraction
    ideal: Fraction
    bubble_fraction: float
    peak_in_flight: tuple[int, ...]
    breakdown: Mapping[str, float]
    program: Program
    simulation: Simulation

    @property
    def timeline(self) -> Timeline:
        return self.simulation.timeline

    @property
    def bubble_overhead(self) -> float:
        """makespan / ideal - 1."""
        return float(self.makespan / self.ideal - 1)

    def record(self) -> dict[str, Any]:
        """The JSON answer of `weft schedule`."""
        return {
            "makespan_s": float(self.makespan),
            "bubble_fraction": self.bubble_fraction,
            "bubble_overhead": self.bubble_overhead,
            "peak_in_flight": list(self.peak_in_flight),
            "instructions": self.simulation.instructions,
            "breakdown": dict(self.breakdown),
            "simulate_s": self.simulation.simulate_s,
        }


def simulate_schedule(
    name: str,
    *,
    devices: int,
    loops: int = 1,
    micro_batches: int,
    forward: Number = 1,
    backward: Number = 2,
    hop: Number = 0,
    options: Options | None = None,
) -> ScheduleFigures:
    """Simulate one isolated step on uniform stages, without optimizer and data-parallel traffic.

    Raises:
        InputError: for an unknown schedule, counts below one, negative or unreadable times, or a pipeline
            that the schedule refuses.
    """
    schedule = get_schedule(name)
    durations = _require_valid(devices, loops, micro_batches, forward, backward, hop)
    options = options or {}
    pipeline = Pipeline(devices, devices * loops, micro_batches)
    reason = schedule.refuse(pipeline, options)
    if reason is not None:
        raise InputError(Violation(f"schedule {name}", reason))
    placement = schedule.placement(pipeline)
    layout = PipelineLayout(
        stages=tuple(StageLayout(replicas=((int(device),),)) for device in placement),
        micro_batches=(micro_batches,),
        message_bytes={(stage, stage + 1): 1 for stage in range(pipeline.stages - 1)},
    )
    program = build_training_program(layout, schedule, options)
    parts = (durations[0] / loops, durations[1] / (2 * loops), durations[2])
    ticks_per_unit = lcm(*(part.denominator for part in parts))
    costs, computation = _costs(program, parts, ticks_per_unit)
    simulation = simulate(program, costs, max_cycles=1)
    makespan = Fraction(simulation.first_step_ticks, ticks_per_unit)
    total = sum(computation, Fraction(0))
    return ScheduleFigures(
        makespan=makespan,
        ideal=max(computation),
        bubble_fraction=float(1 - total / (devices * makespan)),
        peak_in_flight=tuple(peak_in_flight(program)),
        breakdown=busy_by_kind(simulation.timeline),
        program=program,
        simulation=simulation,
    )


def _require_valid(
    devices: int, loops: int, micro_batches: int, forward: Number, backward: Number, hop: Number
) -> tuple[Fraction, Fraction, Fraction]:
    problems = [
        Violation(where, f"{count} is not a count of at least 1", "1")
        for where, count in (("ranks", devices), ("loops", loops), ("micro-batches", micro_batches))
        if count < 1
    ]
    durations = []
    for where, value in (("forward", forward), ("backward", backward), ("hop", hop)):
        try:
            # str of a float is the decimal the user typed, not the binary fraction next to it.
            durations.append(Fraction(str(value) if isinstance(value, float) else value))
        except (ValueError, ZeroDivisionError):
            problems.append(Violation(where, f"{value!r} is not a finite time"))
            continue
        if durations[-1] < 0 or (durations[-1] == 0 and where != "hop"):
            allowed = "0 or more" if where == "hop" else "more than 0"
            problems.append(Violation(where, f"{value} must be {allowed}"))
    if problems:
        raise InputError(problems)
    return durations[0], durations[1], durations[2]


def _costs(
    program: Program, parts: tuple[Fraction, Fraction, Fraction], ticks_per_unit: int
) -> tuple[Costs, list[Fraction]]:
    """Costs in exact ticks, and each rank's computation in units.

    `parts` are the times of one stage's forward, of each half of its backward, and of a crossing.
    """
    forward, half, hop = (int(part * ticks_per_unit) for part in parts)
    if len(program) * max(forward, 2 * half, hop) > MOST_TICKS:
        raise InputError(
            Violation("forward, backward, hop", "have no common unit small enough; use rounder numbers")
        )
    kind = program.columns.kind
    ticks = np.zeros(len(KINDS), dtype=np.int64)
    ticks[FORWARD], ticks[BACKWARD] = forward, 2 * half
    ticks[[BACKWARD_INPUT, BACKWARD_WEIGHT]] = half
    busy = np.zeros(program.ranks, dtype=np.int64)
    np.add.at(busy, program.columns.rank, ticks[kind])
    costs = Costs(
        occupancy=ticks[kind],
        latency=np.where(np.isin(kind, [send for send, _ in MESSAGES]), hop, 0),
        tick_s=1 / ticks_per_unit,
        synchronous=np.zeros(program.ranks, dtype=np.bool_),
        live_bytes=np.zeros(len(program), dtype=np.int64),
        base_bytes=np.zeros(program.ranks, dtype=np.int64),
    )
    return costs, [Fraction(value, ticks_per_unit) for value in busy.tolist()]
