"""Simulate a Program: when every instruction starts and ends, until one cycle is like the next.

An instruction starts when its queue is free, its host has reached it and its edges have ended (plus the
source's latency); a collective starts on all members when the last one is ready. A synchronous rank posts
nothing while it computes; an asynchronous one posts at once. Time is int64 ticks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from weft.errors import InputError, Violation
from weft.predict.costs import Costs
from weft.predict.engine import CycleGraph
from weft.predict.live_bytes import peak_live_bytes
from weft.program.kinds import KINDS
from weft.program.program import NONE, Edges, Ints, Program
from weft.timeline.timeline import Timeline

Mask = npt.NDArray[np.bool_]

MAX_CYCLES = 16


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What the simulator says about a Program.

    Attributes:
        timeline: the last cycle simulated, which is a steady one if `steady`. Instructions posted before
            that cycle began count as posted at its beginning.
        first_step_s: from nothing to the end of the first step, the prologue included.
        step_s: time per step of a steady cycle; the mean over the later half of the cycles if not `steady`.
        steady: whether every instruction of the last cycle came exactly one period after its predecessor.
        cycles: how many cycles were simulated.
        peak_bytes: per rank, the most bytes live at once.
        peak_position: per rank, the instruction at whose end that happens; -1 where nothing changes.
        instructions: instructions of one cycle.
        simulate_s: what the simulation itself took.
    """

    timeline: Timeline
    first_step_s: float
    step_s: float
    steady: bool
    cycles: int
    peak_bytes: Ints
    peak_position: Ints
    instructions: int
    simulate_s: float


@dataclass(frozen=True, kw_only=True)
class _Unrolled:
    """A cycle's inner edges and those that reach over cycles, from which its release times come.

    `first` differs from `later` only by the prologue.
    """

    first: CycleGraph
    later: CycleGraph
    carried: Edges
    carried_delay: Ints
    posted_after: Ints
    last_computation: Ints


def simulate(
    program: Program,
    costs: Costs,
    *,
    max_cycles: int = MAX_CYCLES,
    run: str = "",
    plan_id: str = "",
    compiled: bool | None = None,
) -> Simulation:
    """Unroll the program until its period is exactly steady, or for `max_cycles` cycles.

    Args:
        program, costs: the instructions and their times; `costs` has one row per instruction.
        max_cycles: 1 simulates one isolated cycle.
        run, plan_id: names written into the timeline.
        compiled: True or False forces the compiled or the plain engine; they agree exactly.

    Raises:
        InputError: when instructions wait for each other in a circle; it names them.
    """
    began = time.perf_counter()
    unrolled = _unroll(program, costs)
    starts, ends = [], []
    steady_for, reach = 0, max(1, int(unrolled.carried.distance.max(initial=1)))
    body = program.columns.iteration != NONE
    while len(ends) < max_cycles and steady_for < reach:
        graph = unrolled.later if ends else unrolled.first
        start, end, left = graph.run(_release(unrolled, ends), compiled)
        if left.any():
            raise InputError(_stuck(program, graph, left))
        starts.append(start)
        ends.append(end)
        if len(ends) > 1:
            shift = (ends[-1] - ends[-2])[body]
            steady_for = steady_for + 1 if shift.size == 0 or (shift == shift[0]).all() else 0
    posted = _posted(program, costs, unrolled, ends)
    period = _period(ends, body)
    peak, position = peak_live_bytes(program, costs, ends[-1], period)
    first_step = program.columns.iteration <= 0
    return Simulation(
        timeline=_timeline(program, costs, run, plan_id, posted, starts[-1], ends[-1]),
        first_step_s=int(ends[0][first_step].max(initial=0)) * costs.tick_s,
        step_s=period * costs.tick_s / program.steps_per_cycle,
        steady=steady_for >= reach,
        cycles=len(ends),
        peak_bytes=peak,
        peak_position=position,
        instructions=len(program),
        simulate_s=time.perf_counter() - began,
    )


def _period(ends: list[Ints], body: Mask) -> float:
    """Ticks per cycle: of the last cycle when steady, and the mean over the later half otherwise."""
    finish = [int(end[body].max(initial=0)) for end in ends]
    if len(finish) == 1:
        return finish[0]
    if np.ptp((ends[-1] - ends[-2])[body], initial=None) == 0 if body.any() else True:
        return finish[-1] - finish[-2]
    half = (len(finish) - 1) // 2
    return (finish[-1] - finish[half]) / (len(finish) - 1 - half)
