"""The orders of the built-in schedules, and the registry."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import weft.program.schedules as schedules
from weft.errors import InputError
from weft.program.kinds import BACKWARD, FORWARD, KINDS
from weft.program.schedules import SCHEDULES, all_schedules, get_schedule
from weft.program.schedules.base import ComputeOrder, Pipeline
from weft.program.schedules.breadth_first import BreadthFirst


@st.composite
def runnable(draw: st.DrawFn) -> tuple[str, Pipeline]:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    devices = draw(st.integers(1, 6))
    stages = devices if name != "breadth-first" else draw(st.integers(devices, 4 * devices))
    return name, Pipeline(devices=devices, stages=stages, micro_batches=draw(st.integers(1, 12)))


def words(order: ComputeOrder) -> str:
    return " ".join(
        f"{KINDS[kind].symbol}{stage}.{micro_batch}" for kind, stage, micro_batch in zip(*order, strict=True)
    )


@given(runnable())
def test_every_stage_and_micro_batch_runs_once_each_way_on_its_device(case: tuple[str, Pipeline]) -> None:
    name, pipeline = case
    schedule = get_schedule(name)
    assert schedule.refuse(pipeline, {}) is None
    placement = schedule.placement(pipeline)
    seen = []
    for device in range(pipeline.devices):
        order = schedule.order(pipeline, device, {})
        assert (placement[order.stage] == device).all()
        position = {row: place for place, row in enumerate(zip(*(c.tolist() for c in order), strict=True))}
        assert len(position) == len(order.kind)
        for (kind, stage, micro_batch), place in position.items():
            if kind == FORWARD:
                assert place < position[BACKWARD, stage, micro_batch]
        seen += list(position)
    assert len(seen) == 2 * pipeline.stages * pipeline.micro_batches
    assert set(np.unique([row[0] for row in seen])) == {FORWARD, BACKWARD}


@given(runnable())
def test_backwards_of_a_stage_are_in_fifo_order(case: tuple[str, Pipeline]) -> None:
    """Gradients then accumulate in the order 0, 1, 2, ... under every schedule."""
    name, pipeline = case
    for device in range(pipeline.devices):
        order = get_schedule(name).order(pipeline, device, {})
        for stage in np.unique(order.stage):
            for kind in (FORWARD, BACKWARD):
                mine = order.micro_batch[(order.stage == stage) & (order.kind == kind)]
                assert mine.tolist() == list(range(pipeline.micro_batches))


@given(runnable())
def test_peak_in_flight(case: tuple[str, Pipeline]) -> None:
    name, pipeline = case
    for device in range(pipeline.devices):
        order = get_schedule(name).order(pipeline, device, {})
        peak = int(np.cumsum(np.where(order.kind == FORWARD, 1, -1)).max())
        local = len(range(device, pipeline.stages, pipeline.devices))
        expected = {
            "gpipe": pipeline.micro_batches,
            "1f1b": min(pipeline.micro_batches, pipeline.devices - device),
            "breadth-first": pipeline.micro_batches * local,
        }
        assert peak == expected[name]


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
    ("name", "devices", "stages"), [("gpipe", 2, 4), ("1f1b", 2, 4), ("gpipe", 3, 2), ("breadth-first", 3, 2)]
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
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(given_name: str, meant: str) -> None:
    with pytest.raises(InputError) as caught:
        get_schedule(given_name)
    assert [violation.nearest for violation in caught.value.violations] == [meant]


class Renamed(BreadthFirst):
    name = "third-party"


def _install(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    entry = EntryPoint(name="x", value=path, group="weft.schedules")
    monkeypatch.setattr(schedules, "entry_points", lambda group: [entry] if group == "weft.schedules" else [])


def test_third_parties_add_schedules_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EntryPoint, "load", lambda entry: Renamed)
    _install(monkeypatch, "third:Party")
    assert get_schedule("third-party").name == "third-party"
    assert list(all_schedules()) == ["gpipe", "1f1b", "breadth-first", "third-party"]


def test_two_schedules_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "weft.program.schedules.gpipe:GPipe")
    with pytest.raises(InputError, match="two schedules are called 'gpipe'"):
        all_schedules()
