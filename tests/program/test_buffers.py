"""Gathers and reductions by the buffer rule: the published counts, and laws that any order keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.program.buffers import gathers, reductions
from weft.program.kinds import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from weft.program.schedules import SCHEDULES, get_schedule
from weft.program.schedules.base import Pipeline


def order_of(name: str, devices: int, micro_batches: int, loops: int, device: int = 0, **options: int):
    pipeline = Pipeline(devices, devices * loops, micro_batches)
    return get_schedule(name).order(pipeline, device, options)


GOLDEN = [
    ("breadth-first", (4, 8, 4), {}, (6, 4)),
    ("breadth-first", (4, 16, 4), {}, (6, 4)),
    ("breadth-first", (4, 32, 8), {}, (14, 8)),
    ("depth-first", (4, 8, 4), {}, (20, 8)),
    ("depth-first", (4, 16, 4), {}, (44, 16)),
    ("depth-first", (4, 32, 8), {}, (268, 64)),
    ("hybrid", (4, 32, 8), {"depth": 8}, (98, 64)),
]


@pytest.mark.parametrize(("name", "sizes", "options", "counts"), GOLDEN)
def test_counts_of_the_first_device_with_two_buffers(name, sizes, options, counts):
    order = order_of(name, *sizes, **options)
    assert (len(gathers(order, 2)), len(reductions(order, 2))) == counts


ACCEPTED = {
    name: [
        pipeline
        for devices in range(1, 5)
        for loops in range(1, 5)
        for micro_batches in (1, devices, 2 * devices, 4 * devices)
        if schedule.refuse(pipeline := Pipeline(devices, devices * loops, micro_batches), {}) is None
    ]
    for name, schedule in SCHEDULES.items()
}


@st.composite
def orders(draw):
    name = draw(st.sampled_from(sorted(ACCEPTED)))
    pipeline = draw(st.sampled_from(ACCEPTED[name]))
    device = draw(st.integers(0, pipeline.devices - 1))
    return get_schedule(name).order(pipeline, device, {})


@given(orders(), st.integers(1, 5))
def test_every_stage_is_gathered_and_reduced_and_events_are_in_order(order, buffers):
    stages = set(order.stage.tolist())
    for events in (gathers(order, buffers), reductions(order, buffers)):
        assert {event.stage for event in events} == stages
        assert all(event.after < event.before for event in events)
        for stage in stages:
            mine = [event for event in events if event.stage == stage]
            assert [event.part for event in mine] == list(range(len(mine)))
            assert [event.before for event in mine] == sorted(event.before for event in mine)


@given(orders())
def test_a_buffer_for_every_stage_needs_one_gather_and_one_reduction_each(order):
    stages = len(set(order.stage.tolist()))
    assert len(gathers(order, stages)) == len(reductions(order, stages)) == stages


@given(orders(), st.integers(1, 5))
def test_what_reads_weights_finds_those_of_its_stage_in_its_buffer(order, buffers):
    local = {stage: index for index, stage in enumerate(sorted(set(order.stage.tolist())))}
    gathered = {event.before: event.stage for event in gathers(order, buffers)}
    content = {}
    for position, (kind, stage) in enumerate(zip(order.kind.tolist(), order.stage.tolist(), strict=True)):
        if position in gathered:
            content[local[gathered[position]] % buffers] = gathered[position]
        if kind in (FORWARD, BACKWARD, BACKWARD_INPUT):
            assert content[local[stage] % buffers] == stage


@given(orders(), st.integers(1, 4))
def test_no_gradient_is_added_between_its_last_reduction_and_the_end(order, buffers):
    last = {event.stage: event.after for event in reductions(order, buffers)}
    for position, (kind, stage) in enumerate(zip(order.kind.tolist(), order.stage.tolist(), strict=True)):
        if kind in (BACKWARD, BACKWARD_WEIGHT):
            assert position <= last[stage]
