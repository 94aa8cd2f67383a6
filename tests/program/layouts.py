"""Layouts and programs that the tests of several rooms build."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, islice
from math import lcm
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from weft.describe.layer_graph import chain_edges
from weft.describe.plan import Blocking, Sharding
from weft.describe.replica_grid import ReplicaGrid
from weft.methods.blocking.program import Blocked
from weft.methods.gradient_norm.program import NormOptions
from weft.methods.sharding.kinds import GATHER, REDUCE, REDUCE_ACROSS
from weft.methods.sharding.program import Shared
from weft.methods.tying.kinds import REDUCE_TIED
from weft.methods.tying.program import Tied, TiedWeights
from weft.program.build import build_training_program
from weft.program.layout import PipelineLayout, StageLayout
from weft.program.program import Program
from weft.program.schedules import SCHEDULES, get_schedule
from weft.program.schedules.base import Pipeline

COLLECTIVES = (GATHER, REDUCE, REDUCE_ACROSS, REDUCE_TIED)
LOOPED = ("depth-first", "breadth-first", "hybrid")


def asked(
    sharding: Sharding = "zero-0",
    *,
    island: int | None = None,
    blocking: Sequence[Blocking] = (),
    norm: bool = False,
    told: bool = False,
    tied: Sequence[TiedWeights] = (),
) -> dict[str, Any]:
    """What a program is asked of weft's own methods."""
    methods: dict[str, Any] = {"sharding": Shared(sharding, island)}
    if blocking:
        methods["blocking"] = Blocked(tuple(blocking), sharding in ("zero-0", "zero-1"))
    if norm:
        methods["gradient-norm"] = NormOptions()
    if told:
        methods["micro-batch-norms"] = True
    if tied:
        methods["tying"] = Tied(tuple(tied), ReplicaGrid())
    return methods


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
    placement: npt.ArrayLike,
    micro_batches: tuple[int, ...],
    lanes: int = 1,
    edges: tuple[tuple[int, int], ...] | None = None,
    frozen_stages: int = 0,
) -> PipelineLayout:
    """Stage s on device `placement[s]`, or `placement[p][s]` on path p; `micro_batches` of each pipeline."""
    table = np.atleast_2d(placement)
    paths, stages = table.shape
    pipelines = len(micro_batches)
    edges = tuple((stage, stage + 1) for stage in range(stages - 1)) if edges is None else edges
    return PipelineLayout(
        stages=tuple(
            StageLayout(
                replicas=tuple(
                    tuple((device * pipelines + pipeline) * lanes + lane for lane in range(lanes))
                    for pipeline in range(pipelines)
                    for device in devices
                ),
                gradient_bytes=1000 + stage,
                weight_bytes=500 + stage,
            )
            for stage, devices in enumerate(table.T.tolist())
        ),
        micro_batches=tuple(count // paths for count in micro_batches for _ in range(paths)),
        message_bytes={edge: 64 + edge[0] for edge in edges},
        paths=paths,
        frozen_stages=frozen_stages,
    )


def dealt_layout(
    copies: Sequence[int],
    micro_batches: tuple[int, ...],
    edges: Sequence[tuple[int, int]] | None = None,
    splits: Sequence[int] = (),
    frozen_stages: int = 0,
    lanes: Sequence[int] = (),
) -> PipelineLayout:
    """Stage s with `copies[s]` replicas in each pipeline; ranks go by stage; `micro_batches` of each one.

    Replicas of stage s have `lanes[s]` ranks, default 1.
    """
    paths, pipelines = lcm(*copies), len(micro_batches)
    edges = chain_edges(len(copies)) if edges is None else edges
    widths, rank = lanes or [1] * len(copies), count()
    return PipelineLayout(
        stages=tuple(
            StageLayout(
                replicas=tuple(tuple(islice(rank, widths[stage])) for _ in range(pipelines * copies[stage])),
                gradient_bytes=1000 + stage,
                weight_bytes=500 + stage,
                splits=splits[stage] if splits else 1,
            )
            for stage in range(len(copies))
        ),
        micro_batches=tuple(share // paths for share in micro_batches for _ in range(paths)),
        message_bytes={edge: 64 + edge[0] for edge in edges},
        paths=paths,
        frozen_stages=frozen_stages,
    )


def schedule_layout(
    name: str,
    devices: int,
    stages: int,
    micro_batches: tuple[int, ...],
    lanes: int = 1,
    frozen_stages: int = 0,
) -> PipelineLayout:
    """Stages where the schedule wants them."""
    pipeline = Pipeline(devices, stages, micro_batches[0])
    placement = get_schedule(name).placement(pipeline)
    return placed_layout(placement, micro_batches, lanes, frozen_stages=frozen_stages)


def training_program(
    name: str,
    devices: int,
    stages: int,
    micro_batches: tuple[int, ...],
    lanes: int = 1,
    *,
    sharding: Sharding = "zero-0",
    blocking: Sequence[Blocking] = (),
) -> Program:
    layout = schedule_layout(name, devices, stages, micro_batches, lanes)
    return build_training_program(layout, get_schedule(name), {}, methods=asked(sharding, blocking=blocking))


@st.composite
def pipelines(draw: st.DrawFn, max_devices: int = 4) -> tuple[str, int, int, tuple[int, ...], int]:
    """Arguments of `training_program`: all schedules, ragged loops, unequal shares, tensor lanes."""
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    devices = draw(legal_devices(schedule, max_devices))
    stages = draw(legal_stages(schedule, devices))
    micro_batches = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    if schedule == "depth-first":
        micro_batches = [devices * (1 + count % 2) for count in micro_batches]
    if schedule == "chimera":
        micro_batches = [devices * (1 + count % 3) for count in micro_batches]
    return schedule, devices, stages, tuple(micro_batches), draw(st.integers(1, 2))


def legal_devices(schedule: str, most: int) -> st.SearchStrategy[int]:
    """Numbers of devices that the schedule takes."""
    return st.sampled_from(range(2, most + 1, 2)) if schedule == "chimera" else st.integers(1, most)


def legal_stages(schedule: str, devices: int) -> st.SearchStrategy[int]:
    """Numbers of stages that the schedule takes on so many devices."""
    if schedule in LOOPED:
        return st.integers(devices, 3 * devices)
    return st.just(2 * devices if schedule == "zb-v" else devices)


def sharded_program(case: tuple[str, int, int, tuple[int, ...], int], sharding: Sharding) -> Program:
    """The program of a case of `pipelines`, with equal shares where buffers need them."""
    name, devices, stages, micro_batches, lanes = case
    if sharding in ("zero-2", "zero-3"):
        micro_batches = micro_batches[:1] * len(micro_batches)
    return training_program(name, devices, stages, micro_batches, lanes, sharding=sharding)
