"""Layouts and programs that the tests of several rooms build."""

from __future__ import annotations

from hypothesis import strategies as st

from weft.program.build import build_training_program
from weft.program.layout import PipelineLayout, StageLayout
from weft.program.program import Program
from weft.program.schedules import get_schedule


def ring_layout(
    devices: int,
    stages: int,
    micro_batches: tuple[int, ...],
    lanes: int = 1,
    edges: tuple[tuple[int, int], ...] | None = None,
) -> PipelineLayout:
    """Stage s on device s mod `devices`, one pipeline replica per entry of `micro_batches`."""
    replicas = len(micro_batches)
    edges = tuple((stage, stage + 1) for stage in range(stages - 1)) if edges is None else edges
    return PipelineLayout(
        stages=tuple(
            StageLayout(
                replicas=tuple(
                    tuple((stage % devices * replicas + replica) * lanes + lane for lane in range(lanes))
                    for replica in range(replicas)
                ),
                gradient_bytes=1000 + stage,
            )
            for stage in range(stages)
        ),
        micro_batches=micro_batches,
        message_bytes={edge: 64 + edge[0] for edge in edges},
    )


def training_program(
    schedule: str, devices: int, stages: int, micro_batches: tuple[int, ...], lanes: int = 1
) -> Program:
    return build_training_program(
        ring_layout(devices, stages, micro_batches, lanes), get_schedule(schedule), {}
    )


@st.composite
def pipelines(draw: st.DrawFn, max_devices: int = 4) -> tuple[str, int, int, tuple[int, ...], int]:
    """Arguments of `training_program`: all schedules, ragged loops, unequal shares, tensor lanes."""
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "breadth-first"]))
    devices = draw(st.integers(1, max_devices))
    stages = devices if schedule != "breadth-first" else draw(st.integers(devices, 3 * devices))
    micro_batches = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    return schedule, devices, stages, tuple(micro_batches), draw(st.integers(1, 2))
