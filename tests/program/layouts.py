"""Layouts and programs that the tests of several rooms build."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from weft.program.build import build_training_program
from weft.program.layout import PipelineLayout, StageLayout
from weft.program.program import Program
from weft.program.schedules import SCHEDULES, get_schedule
from weft.program.schedules.base import Pipeline

LOOPED = ("depth-first", "breadth-first", "hybrid")


def ring_layout(
    devices: int,
    stages: int,
    micro_batches: tuple[int, ...],
    lanes: int = 1,
    edges: tuple[tuple[int, int], ...] | None = None,
) -> PipelineLayout:
    """Stage s on device s mod `devices`, one pipeline replica per entry of `micro_batches`."""
    return placed_layout([stage % devices for stage in range(stages)], micro_batches, lanes, edges)


def placed_layout(
    placement: Sequence[int],
    micro_batches: tuple[int, ...],
    lanes: int = 1,
    edges: tuple[tuple[int, int], ...] | None = None,
) -> PipelineLayout:
    """Stage s on device `placement[s]`, one pipeline replica per entry of `micro_batches`."""
    replicas = len(micro_batches)
    edges = tuple((stage, stage + 1) for stage in range(len(placement) - 1)) if edges is None else edges
    return PipelineLayout(
        stages=tuple(
            StageLayout(
                replicas=tuple(
                    tuple((device * replicas + replica) * lanes + lane for lane in range(lanes))
                    for replica in range(replicas)
                ),
                gradient_bytes=1000 + stage,
            )
            for stage, device in enumerate(placement)
        ),
        micro_batches=micro_batches,
        message_bytes={edge: 64 + edge[0] for edge in edges},
    )


def schedule_layout(
    name: str, devices: int, stages: int, micro_batches: tuple[int, ...], lanes: int = 1
) -> PipelineLayout:
    """Stages where the schedule wants them."""
    pipeline = Pipeline(devices, stages, micro_batches[0])
    return placed_layout(get_schedule(name).placement(pipeline).tolist(), micro_batches, lanes)


def training_program(
    name: str, devices: int, stages: int, micro_batches: tuple[int, ...], lanes: int = 1
) -> Program:
    layout = schedule_layout(name, devices, stages, micro_batches, lanes)
    return build_training_program(layout, get_schedule(name), {})


@st.composite
def pipelines(draw: st.DrawFn, max_devices: int = 4) -> tuple[str, int, int, tuple[int, ...], int]:
    """Arguments of `training_program`: all schedules, ragged loops, unequal shares, tensor lanes."""
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    devices = draw(st.integers(1, max_devices))
    stages = draw(legal_stages(schedule, devices))
    micro_batches = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    if schedule == "depth-first":
        micro_batches = [devices * (1 + count % 2) for count in micro_batches]
    return schedule, devices, stages, tuple(micro_batches), draw(st.integers(1, 2))


def legal_stages(schedule: str, devices: int) -> st.SearchStrategy[int]:
    """Numbers of stages that the schedule takes on so many devices."""
    if schedule in LOOPED:
        return st.integers(devices, 3 * devices)
    return st.just(2 * devices if schedule == "zb-v" else devices)
