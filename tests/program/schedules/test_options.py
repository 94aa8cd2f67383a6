"""Options of the schedules: every legal value is a valid program, every illegal one names a legal one."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from program.layouts import ring_layout
from program.rendezvous import stuck_rows

from weft.program.build import build_training_program
from weft.program.kinds import FORWARD
from weft.program.program import Program
from weft.program.schedules import get_schedule
from weft.program.schedules.base import Pipeline
from weft.program.verify import verify

pipelines = st.integers(1, 4).flatmap(
    lambda devices: st.builds(
        Pipeline, st.just(devices), st.integers(devices, 3 * devices), st.integers(1, 12)
    )
)


def built(name: str, pipeline: Pipeline, options: Mapping[str, int]) -> Program:
    layout = ring_layout(pipeline.devices, pipeline.stages, (pipeline.micro_batches,))
    return build_training_program(layout, get_schedule(name), options)


@given(pipelines, st.integers(1, 14))
def test_any_group_size_is_a_program_or_refused_with_one_that_is(pipeline: Pipeline, size: int) -> None:
    schedule, p, m = get_schedule("depth-first"), pipeline.devices, pipeline.micro_batches
    reason = schedule.refuse(pipeline, {"group_size": size})
    assert (reason is None) == (p <= size <= m and (m % size == 0 or m % size >= p))
    if reason is not None:
        nearest = re.search(r"nearest.*?(\d+)", reason)
        assert nearest is not None
        if m < p:
            assert schedule.refuse(Pipeline(p, pipeline.stages, int(nearest[1])), {}) is None
            return
        size = int(nearest[1])
    program = built("depth-first", pipeline, {"group_size": size})
    assert verify(program) == []
    assert stuck_rows(program) == set()


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 20), st.data())
def test_groups_set_the_micro_batches_in_flight(
    devices: int, loops: int, micro_batches: int, data: st.DataObject
) -> None:
    pipeline = Pipeline(devices, devices * loops, micro_batches)
    size = data.draw(st.sampled_from([devices, micro_batches, -(-micro_batches // 2)]))
    schedule = get_schedule("depth-first")
    assume(schedule.refuse(pipeline, {"group_size": size}) is None)
    for device in range(devices):
        order = schedule.order(pipeline, device, {"group_size": size})
        peak = int(np.cumsum(np.where(order.kind == FORWARD, 1, -1)).max())
        assert peak == min(micro_batches * loops, 2 * (devices - 1 - device) + (loops - 1) * size + 1)


@given(pipelines, st.integers(1, 14))
def test_any_depth_is_a_program_or_refused_with_one_that_is(pipeline: Pipeline, depth: int) -> None:
    reason = get_schedule("hybrid").refuse(pipeline, {"depth": depth})
    assert (reason is None) == (pipeline.micro_batches % depth == 0)
    if reason is not None:
        depth = int(reason.rsplit(" ", 1)[1])
    program = built("hybrid", pipeline, {"depth": depth})
    assert verify(program) == []
    assert stuck_rows(program) == set()


@given(pipelines)
def test_one_round_of_hybrid_is_breadth_first(pipeline: Pipeline) -> None:
    for device in range(pipeline.devices):
        hybrid = get_schedule("hybrid").order(pipeline, device, {"depth": 1})
        breadth_first = get_schedule("breadth-first").order(pipeline, device, {})
        assert all(np.array_equal(one, two) for one, two in zip(hybrid, breadth_first, strict=True))


@pytest.mark.parametrize(("name", "option"), [("depth-first", "group_size"), ("hybrid", "depth")])
@pytest.mark.parametrize("value", [0, -2, 1.5, "4", True])
def test_what_is_no_count_is_refused(name: str, option: str, value: int | float | str | bool) -> None:
    reason = get_schedule(name).refuse(Pipeline(2, 4, 4), {option: value})
    assert reason is not None
    assert option in reason
    assert repr(value) in reason
