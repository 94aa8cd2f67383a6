"""What a schedule is: where stages live and in which order a device computes.

A schedule decides nothing else. Sends, receives, reductions and optimizer steps are added by the
compiler, so a new schedule is one file with one class (see `gpipe.py`), registered in this folder's
`__init__` or through the entry-point group `weft.schedules`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from weft.describe.contract import Contract
from weft.program.arrays import Ints


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One pipeline: `devices` in line, `stages` spread over them, `micro_batches` per step on all paths."""

    devices: int
    stages: int
    micro_batches: int

    @property
    def loops(self) -> int:
        """Stages per device, rounded up."""
        return -(-self.stages // self.devices)


class ComputeOrder(NamedTuple):
    """What one device computes, in order: arrays of equal length (kind code, stage, micro-batch)."""

    kind: Ints
    stage: Ints
    micro_batch: Ints


Options = Mapping[str, int | float | str | bool]


class Schedule(Protocol):
    """One order of micro-batches.

    `name` is what users type; `synonyms` are the names of other frameworks; `options` maps each option a
    user may give to its meaning.

    Three class variables may be left out. `paths`: over how many paths on the same devices it runs, each with
    its own copy of the weights and an equal part of the micro-batches (1). `searched`: the options that
    planners try (the defaults alone). `contract`: what training by it keeps (exact).
    """

    name: ClassVar[str]
    synonyms: ClassVar[tuple[str, ...]]
    options: ClassVar[Mapping[str, str]]

    def refuse(self, pipeline: Pipeline, options: Options) -> str | None:
        """Why this schedule cannot run this pipeline (given, allowed, nearest), or None."""
        ...

    def placement(self, pipeline: Pipeline) -> Ints:
        """Device of each stage, shape (stages,); shape (paths, stages) with several paths."""
        ...

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        """Return the compute order of one device. Micro-batches count from 0 within the pipeline.

        With several paths the first part of the micro-batches runs along the first path, and so on.
        """
        ...


def paths_of(schedule: Schedule) -> int:
    """How many paths the schedule runs over the devices of one pipeline; 1 unless it says otherwise."""
    return int(getattr(schedule, "paths", 1))


def searched_options(schedule: Schedule) -> Sequence[Options]:
    """Return the options of the schedule that planners try; its defaults alone unless it says otherwise."""
    return tuple(getattr(schedule, "searched", ({},)))


def contract_of(schedule: Schedule) -> Contract:
    """What training by the schedule keeps; everything unless it says otherwise."""
    return Contract(getattr(schedule, "contract", Contract.EXACT))


def placements(schedule: Schedule, pipeline: Pipeline) -> Ints:
    """Device of each stage on each path, shape (paths, stages)."""
    return np.atleast_2d(schedule.placement(pipeline))
