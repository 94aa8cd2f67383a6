"""weft's orders are those of torch's own generators, of which only the calculation is used."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from weft.program.kinds import KINDS
from weft.program.schedules import get_schedule
from weft.program.schedules.base import Pipeline

GENERATORS = {
    "depth-first": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}


def torch_order(name: str, pipeline: Pipeline, device: int) -> list[str]:
    """One rank's actions, without the idle slots that only torch's unit-time picture needs."""
    rounds = max(1, pipeline.micro_batches // pipeline.devices)
    state = SimpleNamespace(
        pp_group_size=pipeline.devices,
        n_local_stages=pipeline.loops,
        num_stages=pipeline.stages,
        microbatches_per_round=pipeline.micro_batches // rounds,
        _n_microbatches=pipeline.micro_batches,
    )
    actions = GENERATORS[name]._calculate_single_rank_operations(state, device)
    return [str(action) for action in actions if action is not None]


def weft_order(name: str, pipeline: Pipeline, device: int) -> list[str]:
    order = get_schedule(name).order(pipeline, device, {})
    return [
        f"{stage}{KINDS[kind].symbol}{micro_batch}" for kind, stage, micro_batch in zip(*order, strict=True)
    ]


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("loops", [1, 2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_depth_first(devices: int, loops: int, rounds: int) -> None:
    pipeline = Pipeline(devices, devices * loops, devices * rounds)
    for device in range(devices):
        assert weft_order("depth-first", pipeline, device) == torch_order("depth-first", pipeline, device)


@pytest.mark.parametrize(("name", "loops"), [("zb-h1", 1), ("zb-v", 2)])
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 7, 8])
def test_zero_bubble_orders_for_any_number_of_micro_batches(name: str, loops: int, devices: int) -> None:
    for micro_batches in [*range(1, 2 * devices + 3), 5 * devices]:
        pipeline = Pipeline(devices, devices * loops, micro_batches)
        for device in range(devices):
            assert weft_order(name, pipeline, device) == torch_order(name, pipeline, device)
