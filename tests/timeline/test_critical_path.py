"""Laws: the path of a steady cycle is as long as its period, and rows off it may take no time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from predict.programs import by_hand, costs_of, random_programs
from timeline.timelines import timeline_of

from weft.methods.sharding.kinds import REDUCE
from weft.predict.simulator import simulate
from weft.program.arrays import Floats, Ints
from weft.program.kinds import BACKWARD, FORWARD, SEND_ACTIVATION
from weft.program.program import Program
from weft.timeline.critical_path import critical_path

TICK_NS = 10**9


@st.composite
def priced_programs(draw: st.DrawFn) -> tuple[Program, Ints, Ints, bool]:
    program = draw(random_programs())
    many = st.lists(st.integers(0, 20), min_size=len(program), max_size=len(program))
    return program, np.array(draw(many)), np.array(draw(many)), draw(st.booleans())


def path_of(program: Program, occupancy: Ints, latency: Ints, synchronous: bool) -> tuple[float, Floats]:
    """The step and the path, in ticks; a path of none where the schedule is not steady."""
    simulation = simulate(program, costs_of(program, occupancy, latency, synchronous=synchronous))
    if not simulation.steady:
        return simulation.step_s, np.zeros(0)
    return simulation.step_s, critical_path(
        program, simulation.timeline, period_ns=simulation.step_s * TICK_NS, delay_ns=latency * TICK_NS
    )


@given(priced_programs())
def test_the_path_of_a_steady_cycle_is_its_period(
    priced: tuple[Program, Ints, Ints, bool],
) -> None:
    program, occupancy, latency, synchronous = priced
    step, path = path_of(program, occupancy, 0 * latency, synchronous)
    if len(path):
        assert np.isclose(path.sum(), step)
        assert (path >= 0.0).all()


@given(priced_programs())
def test_rows_off_the_path_may_take_no_time_and_the_step_is_as_long(
    priced: tuple[Program, Ints, Ints, bool],
) -> None:
    program, occupancy, latency, synchronous = priced
    step, path = path_of(program, occupancy, latency, synchronous)
    if len(path):
        fewer = np.where(path > 0.0, occupancy, 0)
        shorter = simulate(program, costs_of(program, fewer, latency, synchronous=synchronous))
        assert not shorter.steady or shorter.step_s == step


def test_a_measured_path_crosses_ranks_and_leaves_first_and_last_cycle_out() -> None:
    rows = [(0, FORWARD, 0), (0, SEND_ACTIVATION, 0), (1, FORWARD, 1), (1, BACKWARD, 1)]
    program = by_hand(rows, [(0, 1, 0), (1, 2, 0), (3, 0, 1)])
    took = (5, 2, 3, 4)

    def durations(row: int, step: int) -> int:
        return TICK_NS * (100 if step in (0, 4) else took[row])

    measured = timeline_of(program, durations, steps=5, clock="monotonic")
    assert critical_path(program, measured).tolist() == [5.0, 2.0, 3.0, 4.0]
    # A run that was resumed has none of its earlier steps.
    later = replace(measured, step=measured.step + 17)
    assert critical_path(program, later).tolist() == [5.0, 2.0, 3.0, 4.0]
    assert not critical_path(program, measured.take(measured.step > 9)).any()


def test_a_collective_waits_for_the_last_of_its_members() -> None:
    rows = [(0, FORWARD, 0), (0, REDUCE, 0), (1, FORWARD, 0), (1, REDUCE, 0)]
    program = by_hand(rows, [(0, 1, 0), (2, 3, 0), (1, 0, 1), (3, 2, 1)], groups=((0, 1),))
    for took, expected in (((3, 2, 7, 2), [0, 0, 7]), ((7, 2, 3, 2), [7, 0, 0])):
        _, path = path_of(program, np.array(took), np.zeros(4, dtype=np.int64), synchronous=False)
        assert [path[0], 0, path[2]] == expected
        assert path[1] + path[3] == 2.0


def test_the_longer_of_two_ways_is_the_path() -> None:
    rows = [(0, FORWARD, 0), (1, FORWARD, 1), (2, BACKWARD, 2)]
    program = by_hand(rows, [(0, 2, 0), (1, 2, 0), (2, 0, 1), (2, 1, 1)])
    _, path = path_of(program, np.array([3, 7, 1]), np.zeros(3, dtype=np.int64), synchronous=False)
    assert path.tolist() == [0.0, 7.0, 1.0]
