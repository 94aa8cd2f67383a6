"""The orders of the built-in schedules, and the registry."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from installing import register
from program.layouts import legal_devices, legal_stages

from weft.describe.contract import Contract
from weft.errors import InputError
from weft.program.kinds import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, KINDS
from weft.program.schedules import SCHEDULES, all_schedules, get_schedule
from weft.program.schedules.base import (
    ComputeOrder,
    Pipeline,
    contract_of,
    placements,
    searched_options,
)

SPLIT = ("zb-h1", "graph-zb-h1", "zb-v", "placed-zb")
CHANGE = {FORWARD: 1, BACKWARD: -1, BACKWARD_INPUT: 0, BACKWARD_WEIGHT: -1}


@st.composite
def runnable(draw: st.DrawFn) -> tuple[str, Pipeline]:
    """Every schedule on every pipeline that it takes by default: ragged loops, M < P, P = 1, M = 1."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    devices = draw(legal_devices(name, 6))
    if name == "chimera":
        return name, Pipeline(devices, devices, devices * draw(st.integers(1, 4)))
    least = devices if name == "depth-first" else 1
    return name, Pipeline(
        devices=devices,
        stages=draw(legal_stages(name, devices)),
        micro_batches=draw(
            st.integers(least, 12).filter(
                lambda count: name != "depth-first" or count % devices == 0 or devices == 1
            )
        ),
    )


def words(order: ComputeOrder) -> str:
    return " ".join(
        f"{KINDS[kind].symbol}{stage}.{micro_batch}" for kind, stage, micro_batch in zip(*order, strict=True)
    )


@given(runnable())
def test_every_stage_and_micro_batch_runs_once_each_way_on_its_device(case: tuple[str, Pipeline]) -> None:
    name, pipeline = case
    schedule = get_schedule(name)
    assert schedule.refuse(pipeline, {}) is None
    placement = placements(schedule, pipeline)
    passes = [FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT] if name in SPLIT else [FORWARD, BACKWARD]
    seen = []
    for device in range(pipeline.devices):
        order = schedule.order(pipeline, device, {})
        path = order.micro_batch * len(placement) // pipeline.micro_batches
        assert (placement[path, order.stage] == device).all()
        position = {row: place for place, row in enumerate(zip(*(c.tolist() for c in order), strict=True))}
        assert len(position) == len(order.kind)
        for kind, stage, micro_batch in position:
            assert kind in passes
            places = [position[each, stage, micro_batch] for each in passes]
            assert places == sorted(places)
        seen += list(position)
    assert len(seen) == len(passes) * pipeline.stages * pipeline.micro_batches


@given(runnable())
def test_every_kind_on_a_stage_is_in_fifo_order(case: tuple[str, Pipeline]) -> None:
    """Gradients then accumulate in the order 0, 1, 2, ... under every schedule."""
    name, pipeline = case
    placement = placements(get_schedule(name), pipeline)
    share = pipeline.micro_batches // len(placement)
    for device in range(pipeline.devices):
        order = get_schedule(name).order(pipeline, device, {})
        for stage in np.unique(order.stage):
            first = share * placement[:, stage].tolist().index(device)
            for kind in np.unique(order.kind):
                mine = order.micro_batch[(order.stage == stage) & (order.kind == kind)]
                assert mine.tolist() == list(range(first, first + share))


@given(runnable())
def test_peak_in_flight(case: tuple[str, Pipeline]) -> None:
    """Sheet of Lamy-Poirier's schedule and its rivals; a split backward lets go with its weight part."""
    name, pipeline = case
    p, m, v = pipeline.devices, pipeline.micro_batches, pipeline.loops
    for device in range(p):
        order = get_schedule(name).order(pipeline, device, {})
        peak = int(np.cumsum([CHANGE[kind] for kind in order.kind.tolist()]).max())
        local = len(range(device, pipeline.stages, p))
        expected = {
            "gpipe": m,
            "1f1b": min(m, p - device),
            "graph-1f1b": min(m, p - device),
            "breadth-first": m * local,
            "zb-h1": min(m, p),
            "graph-zb-h1": min(m, p),
            "chimera": p // 2 + 1 + min(device, p - 1 - device),
        }
        if name in expected:
            assert peak == expected[name]
        elif name in ("placed", "placed-zb"):
            assert peak <= min(m, p) * local
        elif name == "zb-v":
            assert peak == 2 * p if m >= 2 * p - 1 else peak <= 2 * m
        elif name == "hybrid":
            breadth = min(count for count in range(1, m + 1) if m % count == 0 and (count >= p or count == m))
            assert peak == breadth * local
        elif pipeline.stages == p * v:
            assert peak == min(m * v, 2 * (p - 1 - device) + (v - 1) * p + 1)
        else:
            assert peak <= m * local


@given(st.integers(1, 6), st.integers(1, 8))
def test_one_loop_breadth_first_is_gpipe(devices: int, micro_batches: int) -> None:
    pipeline = Pipeline(devices=devices, stages=devices, micro_batches=micro_batches)
    for device in range(devices):
        one = get_schedule("gpipe").order(pipeline, device, {})
        two = get_schedule("breadth-first").order(pipeline, device, {})
        assert words(one) == words(two)


@given(st.integers(1, 6), st.integers(1, 12), st.data())
def test_one_forward_one_backward_is_the_warm_up_the_turns_and_the_drain(
    devices: int, micro_batches: int, data: st.DataObject
) -> None:
    device = data.draw(st.integers(0, devices - 1))
    warm_up = min(micro_batches, devices - 1 - device)
    expected = [f"F{device}.{m}" for m in range(warm_up)]
    for turn in range(micro_batches - warm_up):
        expected += [f"F{device}.{warm_up + turn}", f"B{device}.{turn}"]
    expected += [f"B{device}.{m}" for m in range(micro_batches - warm_up, micro_batches)]
    pipeline = Pipeline(devices=devices, stages=devices, micro_batches=micro_batches)
    assert words(get_schedule("1f1b").order(pipeline, device, {})) == " ".join(expected)


def test_breadth_first_runs_all_micro_batches_of_a_stage_before_the_next() -> None:
    order = get_schedule("breadth-first").order(Pipeline(devices=2, stages=4, micro_batches=2), 1, {})
    assert words(order) == "F1.0 F1.1 F3.0 F3.1 B3.0 B3.1 B1.0 B1.1"


def test_breadth_first_allows_a_ragged_last_loop() -> None:
    pipeline = Pipeline(devices=3, stages=4, micro_batches=1)
    orders = [words(get_schedule("breadth-first").order(pipeline, device, {})) for device in range(3)]
    assert orders == ["F0.0 F3.0 B3.0 B0.0", "F1.0 B1.0", "F2.0 B2.0"]
    assert pipeline.loops == 2


@pytest.mark.parametrize(
    ("name", "devices", "stages"),
    [
        ("gpipe", 2, 4),
        ("1f1b", 2, 4),
        ("graph-1f1b", 2, 4),
        ("gpipe", 3, 2),
        ("breadth-first", 3, 2),
        ("depth-first", 3, 2),
        ("hybrid", 3, 2),
        ("zb-h1", 2, 4),
        ("graph-zb-h1", 2, 4),
        ("zb-v", 3, 4),
        ("chimera", 2, 4),
    ],
)
def test_impossible_pipelines_are_refused_with_both_numbers(name: str, devices: int, stages: int) -> None:
    reason = get_schedule(name).refuse(Pipeline(devices=devices, stages=stages, micro_batches=2), {})
    assert reason is not None
    assert str(devices) in reason
    assert str(stages) in reason


@pytest.mark.parametrize(
    ("given_name", "meant"),
    [
        ("1F1B", "1f1b"),
        ("gpip", "gpipe"),
        ("ScheduleLoopedBFS", "breadth-first"),
        ("pipedream-flush", "1f1b"),
        ("ScheduleZBVZeroBubble", "zb-v"),
        ("interleaved", "depth-first"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(given_name: str, meant: str) -> None:
    with pytest.raises(InputError) as caught:
        get_schedule(given_name)
    assert [violation.nearest for violation in caught.value.violations] == [meant]


def test_third_parties_add_schedules_by_entry_point(weft_example: Path) -> None:
    assert get_schedule("last-in-first-out").name == "last-in-first-out"
    assert list(all_schedules()) == [*SCHEDULES, "in-twos", "last-in-first-out"]


def test_what_a_schedule_leaves_unsaid_is_plain(weft_example: Path) -> None:
    plain, told = get_schedule("last-in-first-out"), get_schedule("in-twos")
    assert (searched_options(plain), contract_of(plain)) == (({},), Contract.EXACT)
    assert (searched_options(told), contract_of(told)) == (({}, {"together": 4}), Contract.UNBIASED)


def test_two_schedules_of_one_name_are_refused(packages: Path) -> None:
    register(packages, "again", {"weft.schedules": {"gpipe": "weft.program.schedules.gpipe:GPipe"}})
    with pytest.raises(InputError, match="two schedules are called 'gpipe'"):
        all_schedules()


def test_a_schedule_without_a_needed_member_is_refused(packages: Path) -> None:
    register(packages, "lacking", {"weft.schedules": {"lacking": "builtins:object"}})
    with pytest.raises(InputError, match="'lacking' is no schedule: it has no name and no synonyms and no"):
        all_schedules()
