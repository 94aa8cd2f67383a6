"""The steps of ranks are those of their timelines, in any order of micro-batches."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from bubble_usage import utilisation

from weft.errors import InputError
from weft.methods.bubble_filling.steps import device_steps
from weft.predict.abstract import ScheduleFigures, simulate_schedule

ORDERS = [
    ("gpipe", None),
    ("1f1b", None),
    ("breadth-first", 2),
    ("depth-first", 2),
    ("chimera", None),
    ("zb-h1", None),
    ("zb-v", 2),
]


def simulated(schedule: str, loops: int | None) -> ScheduleFigures:
    return simulate_schedule(schedule, devices=4, loops=loops, micro_batches=8, forward=Fraction(2, 1000))


@pytest.mark.parametrize(("schedule", "loops"), ORDERS)
def test_steps_of_an_order(schedule: str, loops: int | None) -> None:
    figures = simulated(schedule, loops)
    steps = device_steps(figures.program, figures.timeline)
    assert len(steps) == 4
    assert 1 - sum(map(utilisation, steps)) / 4 == pytest.approx(figures.bubble_fraction)
    for step in steps:
        assert step.end_s == pytest.approx(float(figures.makespan))
        assert all(first.end_s <= one.start_s for first, one in zip(step.busy, step.busy[1:], strict=False))
    ended = Counter((one.ends, one.stage, one.micro_batch) for step in steps for one in step.busy if one.ends)
    stages = 4 * (loops or 1)
    assert set(ended.values()) == {1}
    assert len(ended) == 2 * 8 * stages


def test_the_input_part_of_a_split_backward_ends_it() -> None:
    """Its weight parts, and the step of the optimizer, end no pass."""
    figures = simulated("zb-h1", None)
    (step, *_) = device_steps(figures.program, figures.timeline)
    assert Counter(one.ends for one in step.busy) == {"forward": 8, "backward": 8, None: 8 + 1}


def test_with_a_period_all_idle_time_between_steps_is_one_gap() -> None:
    figures = simulated("1f1b", None)
    alone = device_steps(figures.program, figures.timeline)
    period_s = float(figures.makespan) + 0.001
    for before, step in zip(alone, device_steps(figures.program, figures.timeline, period_s), strict=True):
        assert (step.busy[0].start_s, step.end_s) == (0, period_s)
        shift = before.busy[0].start_s
        assert [one.start_s for one in step.busy] == pytest.approx(
            [one.start_s - shift for one in before.busy]
        )


def test_several_steps_are_refused() -> None:
    figures = simulated("gpipe", None)
    steps = np.arange(len(figures.timeline)) % 2
    with pytest.raises(InputError, match="has 2 steps; gaps are those of one step"):
        device_steps(figures.program, replace(figures.timeline, step=steps))
