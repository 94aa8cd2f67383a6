"""Laws of step times that hold for every order."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from predict.programs import costs_of
from program.layouts import pipelines, sharded_program

from weft.predict.abstract import simulate_schedule
from weft.predict.simulator import simulate
from weft.program.kinds import MESSAGES

LEVELS = st.sampled_from(["zero-0", "zero-1", "zero-2", "zero-3"])
seeds = st.integers(0, 2**32 - 1)


@given(st.integers(1, 5), st.integers(0, 6), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
def test_more_loops_are_never_slower_with_free_messages(
    devices: int, more: int, loops: int, forward: int, backward: int
) -> None:
    def makespan(loops: int) -> Fraction:
        return simulate_schedule(
            "breadth-first",
            devices=devices,
            loops=loops,
            micro_batches=devices + more,
            forward=forward,
            backward=backward,
        ).makespan

    assert makespan(loops + 1) <= makespan(loops)


@given(pipelines(), LEVELS, seeds)
def test_no_instruction_that_takes_longer_makes_a_step_shorter(case, level, seed) -> None:
    program = sharded_program(case, level)
    random = np.random.default_rng(seed)
    occupancy, latency = random.integers(0, 20, (2, len(program)))
    before = simulate(program, costs_of(program, occupancy, latency), max_cycles=1).first_step_ticks
    longer = random.integers(0, 5, len(program)) * (random.random(len(program)) < 0.1)
    after = simulate(program, costs_of(program, occupancy + longer, latency), max_cycles=1)
    assert after.first_step_ticks >= before
    after = simulate(program, costs_of(program, occupancy, latency + longer), max_cycles=1)
    assert after.first_step_ticks >= before


@given(pipelines(), LEVELS, seeds, st.booleans())
def test_a_device_is_busy_or_idle_and_never_twice(case, level, seed, synchronous) -> None:
    """Busy plus idle is the step: instructions of one queue never overlap."""
    program = sharded_program(case, level)
    occupancy = np.random.default_rng(seed).integers(0, 20, len(program))
    simulation = simulate(program, costs_of(program, occupancy, synchronous=synchronous), max_cycles=1)
    timeline = simulation.timeline
    queue = program.queue[timeline.position]
    order = np.lexsort((timeline.end_ns, timeline.start_ns, queue))
    same = queue[order][1:] == queue[order][:-1]
    assert (timeline.start_ns[order][1:][same] >= timeline.end_ns[order][:-1][same]).all()


@given(pipelines(), LEVELS, st.integers(2, 7), seeds)
def test_times_scale_with_their_unit(case, level, factor, seed) -> None:
    program = sharded_program(case, level)
    occupancy, latency = np.random.default_rng(seed).integers(0, 20, (2, len(program)))
    one = simulate(program, costs_of(program, occupancy, latency))
    many = simulate(program, costs_of(program, factor * occupancy, factor * latency))
    assert many.first_step_ticks == factor * one.first_step_ticks
    assert many.step_s == factor * one.step_s


@given(pipelines(), LEVELS, seeds)
def test_two_links_of_half_the_bandwidth_in_series_are_no_faster_than_one(case, level, seed) -> None:
    """A message keeps each busy for twice as long, and reaches the second when it has left the first."""
    program = sharded_program(case, level)
    occupancy, latency = np.random.default_rng(seed).integers(0, 20, (2, len(program)))
    sent = np.isin(program.columns.kind, [send for send, _ in MESSAGES])
    one = simulate(program, costs_of(program, occupancy, latency))
    slower = np.where(sent, 2 * occupancy, occupancy), np.where(sent, latency + 2 * occupancy, latency)
    two = simulate(program, costs_of(program, *slower))
    assert two.first_step_ticks >= one.first_step_ticks
