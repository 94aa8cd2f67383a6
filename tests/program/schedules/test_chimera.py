"""Chimera's order, against what its authors' code gives, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.program.kinds import BACKWARD, FORWARD, KINDS
from weft.program.schedules import get_schedule
from weft.program.schedules.base import ComputeOrder, Pipeline, paths_of, placements

CHIMERA = get_schedule("chimera")


def words(order: ComputeOrder) -> str:
    return " ".join(
        f"{KINDS[kind].symbol}{stage}.{micro_batch}" for kind, stage, micro_batch in zip(*order, strict=True)
    )


def test_the_order_of_four_devices() -> None:
    """Micro-batches 0 and 1 go down, 2 and 3 go up."""
    orders = [words(CHIMERA.order(Pipeline(4, 4, 4), device, {})) for device in range(4)]
    assert orders == [
        "F0.0 F0.1 F3.2 B3.2 F3.3 B3.3 B0.0 B0.1",
        "F1.0 F2.2 F1.1 F2.3 B2.2 B1.0 B2.3 B1.1",
        "F1.2 F2.0 F1.3 F2.1 B2.0 B1.2 B2.1 B1.3",
        "F0.2 F0.3 F3.0 B3.0 F3.1 B3.1 B0.2 B0.3",
    ]


def test_a_second_round_begins_before_the_first_has_drained() -> None:
    order = CHIMERA.order(Pipeline(2, 2, 4), 0, {})
    assert words(order) == "F0.0 F1.2 B1.2 B0.0 F0.1 F1.3 B1.3 B0.1"


@given(st.integers(1, 4), st.integers(1, 4))
def test_the_paths_are_mirror_images(half: int, rounds: int) -> None:
    pipeline = Pipeline(2 * half, 2 * half, 2 * half * rounds)
    share = pipeline.micro_batches // 2
    for device in range(half):
        one = CHIMERA.order(pipeline, device, {})
        two = CHIMERA.order(pipeline, pipeline.devices - 1 - device, {})
        assert np.array_equal(one.kind, two.kind)
        assert np.array_equal(one.stage, two.stage)
        assert np.array_equal(one.micro_batch, (two.micro_batch + share) % pipeline.micro_batches)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_device_runs_both_of_its_stages(half: int, rounds: int, data: st.DataObject) -> None:
    pipeline = Pipeline(2 * half, 2 * half, 2 * half * rounds)
    device = data.draw(st.integers(0, pipeline.devices - 1))
    order = CHIMERA.order(pipeline, device, {})
    held = placements(CHIMERA, pipeline).argsort(axis=1)[:, device].tolist()
    assert held == [device, pipeline.devices - 1 - device]
    for path, stage in enumerate(held):
        mine = order.stage == stage
        assert (order.micro_batch[mine] // (pipeline.micro_batches // 2) == path).all()
        assert np.count_nonzero(mine & (order.kind == FORWARD)) == half * rounds
        assert np.count_nonzero(mine & (order.kind == BACKWARD)) == half * rounds


def test_schedules_have_one_path_unless_they_say_otherwise() -> None:
    assert paths_of(CHIMERA) == 2
    assert paths_of(get_schedule("gpipe")) == 1
    assert placements(CHIMERA, Pipeline(4, 4, 4)).tolist() == [[0, 1, 2, 3], [3, 2, 1, 0]]
    assert placements(get_schedule("gpipe"), Pipeline(2, 2, 1)).tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("pipeline", "reason"),
    [
        (Pipeline(3, 3, 6), "chimera needs an even number of devices, not 3; nearest: 4 devices"),
        (Pipeline(1, 1, 4), "chimera needs an even number of devices, not 1; nearest: 2 devices"),
        (
            Pipeline(4, 4, 6),
            "chimera needs a multiple of its 4 devices as micro-batches, not 6; nearest: 8 micro-batches",
        ),
        (
            Pipeline(4, 4, 1),
            "chimera needs a multiple of its 4 devices as micro-batches, not 1; nearest: 4 micro-batches",
        ),
        (Pipeline(2, 4, 4), "chimera runs one stage per device, not 4 stages on 2 devices"),
    ],
)
def test_what_it_cannot_run_is_refused_with_the_nearest(pipeline: Pipeline, reason: str) -> None:
    assert CHIMERA.refuse(pipeline, {}) == reason
