"""The published model agrees with the published figures, and with simulated orders where it is exact."""

from __future__ import annotations

from fractions import Fraction

import pytest
from bubble_usage import least_steps, refresh_ratio
from pipefisher_model import ModelledStep, StageBytes, critical_passes
from published_blocks import BASE_32, LARGE_32, Block, pipeline, work

from weft.errors import InputError
from weft.predict.abstract import simulate_schedule


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "chimera"])
@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (3, 4)])
def test_passes_are_those_of_the_simulated_order(
    schedule: str, stages: int, forward: int, backward: int
) -> None:
    forwards, backwards = critical_passes(schedule, stages, stages)
    found = simulate_schedule(
        schedule, devices=stages, micro_batches=stages, forward=forward, backward=backward
    )
    assert found.makespan == Fraction(forwards * forward + backwards * backward)


@pytest.mark.parametrize(
    ("stages", "rounds", "simulated", "modelled"), [(4, 2, 30, 27), (8, 2, 66, 57), (8, 3, 96, 81)]
)
def test_several_rounds_of_chimera_take_longer_than_published(
    stages: int, rounds: int, simulated: int, modelled: int
) -> None:
    micro_batches = stages * rounds
    forwards, backwards = critical_passes("chimera", stages, micro_batches)
    found = simulate_schedule("chimera", devices=stages, micro_batches=micro_batches, forward=1, backward=2)
    assert (found.makespan, forwards + 2 * backwards) == (simulated, modelled)


@pytest.mark.parametrize(
    ("block", "schedule", "stages", "before", "steps", "after"),
    [
        (BASE_32, "gpipe", 4, 57.1, 3, 88.7),
        (LARGE_32, "1f1b", 8, 53.3, 2, 90.1),
        (LARGE_32, "chimera", 8, 68.0, 3, 99.3),
    ],
)
def test_published_utilisation(
    block: Block, schedule: str, stages: int, before: float, steps: int, after: float
) -> None:
    model = ModelledStep(schedule=schedule, stages=stages, micro_batches=stages, times=block.stage(3))
    assert 100 * model.utilisation == pytest.approx(before, abs=0.06)
    assert model.least_steps == steps
    assert 100 * model.filled_utilisation(steps) == pytest.approx(after, abs=0.06)


@pytest.mark.parametrize(("schedule", "shares"), [("1f1b", (57, 53, 52)), ("chimera", (76, 68, 64))])
def test_published_utilisation_by_stages(schedule: str, shares: tuple[int, ...]) -> None:
    for stages, share in zip((4, 8, 16), shares, strict=True):
        model = ModelledStep(schedule=schedule, stages=stages, micro_batches=stages, times=BASE_32.stage(3))
        assert 100 * model.utilisation == pytest.approx(share, abs=0.6)


def test_the_ratio_is_that_of_placed_work() -> None:
    model = ModelledStep(schedule="gpipe", stages=4, micro_batches=4, times=BASE_32.stage(3))
    for step in pipeline(BASE_32, "gpipe", 4, 4):
        items = work(BASE_32, step)
        assert refresh_ratio(step, items) == pytest.approx(model.refresh_ratio, rel=1e-6)
        assert least_steps(step, items) == model.least_steps


def test_step_times() -> None:
    times = BASE_32.stage(1)
    model = ModelledStep(schedule="1f1b", stages=4, micro_batches=4, times=times)
    assert model.filled_step_s == pytest.approx(model.pipeline_s + 0.006805300712585449)
    work_s = (71.66688442230225 + 4 * 25.546598434448242) / 1e3
    assert model.serial_step_s() - model.filled_step_s == pytest.approx(work_s)
    assert model.serial_step_s(10) - model.filled_step_s == pytest.approx(work_s / 10)
    again = ModelledStep(schedule="1f1b", stages=4, micro_batches=4, times=times.recomputed())
    assert again.pipeline_s - model.pipeline_s == pytest.approx(7 * times.forward_s)
    assert again.utilisation == pytest.approx(model.utilisation)
    assert again.refresh_ratio < model.refresh_ratio


def test_bytes_of_a_device() -> None:
    stage = StageBytes(activations=100, output_gradients=10, peak_gradients=7, factors=30, parameters=20)
    assert stage.of_device(4) == 400 + 40 + 7 + 60 + 40
    assert stage.of_device(4, recomputed=True) == 100 + 40 + 7 + 60 + 40
    assert stage.of_device(4, stages=2) - stage.of_device(4) == 40


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches", "problem"),
    [("zb-h1", 4, 4, "has no model"), ("chimera", 3, 3, "even stages"), ("chimera", 4, 6, "multiple")],
)
def test_no_model(schedule: str, stages: int, micro_batches: int, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        critical_passes(schedule, stages, micro_batches)
