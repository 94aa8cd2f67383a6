"""The protocol of schedules: the placement of stages and the compute order of each device.

A schedule decides nothing else: the compiler adds sends, receives, reductions and optimizer steps. A new
schedule is one file with one class (see `gpipe.py`). It is registered in this folder's `__init__` or
through the entry-point group `weft.schedules`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from weft.describe.contract import Contract
from weft.describe.layer_graph import chain_edges
from weft.program.arrays import Ints


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One pipeline: `devices` in a row, `stages` spread over them, `micro_batches` per step on all paths.

    `edges` are those of the stage graph, from stages to later ones; None: a chain. `copies` are the replicas
    of each stage, which deal the micro-batches among themselves; None: one of every stage on each path.
    `places` are the devices on which a plan puts the stages; None: no plan does.
    """

    devices: int
    stages: int
    micro_batches: int
    edges: tuple[tuple[int, int], ...] | None = None
    copies: tuple[int, ...] | None = None
    places: tuple[int, ...] | None = None

    @property
    def stage_copies(self) -> tuple[int, ...]:
        """The replicas of each stage that deal micro-batches among themselves, also if each has one."""
        return (1,) * self.stages if self.copies is None else self.copies

    @property
    def stage_edges(self) -> tuple[tuple[int, int], ...]:
        """The edges of the stage graph, also of a chain."""
        return chain_edges(self.stages) if self.edges is None else self.edges

    @property
    def loops(self) -> int:
        """Stages per device, rounded up."""
        return -(-self.stages // self.devices)


class ComputeOrder(NamedTuple):
    """The computations of one device, in order: arrays of equal length (kind code, stage, micro-batch)."""

    kind: Ints
    stage: Ints
    micro_batch: Ints


Options = Mapping[str, int | float | str | bool]


class Schedule(Protocol):
    """One order of micro-batches.

    `name` is the name that users type; `synonyms` are the names in other frameworks; `options` maps each user
    option to its meaning.

    Six class variables are optional. `paths` (1) is the number of paths on the same devices. Each has its
    own copy of the weights and an equal part of the micro-batches. `searched` (the defaults alone) are the
    options that planners try. `contract` (exact) is the contract that training by the schedule keeps.
    `for_graphs` (False) says that the order differs from another one only if stages form a graph. Planners
    try it for models whose layers form no chain. `deals` (False) says that the schedule runs pipelines with
    `copies`. `takes_places` (False) says that it leaves stages where a plan puts them. Planners of layouts,
    which leave that to schedules, do not try it.
    """

    name: ClassVar[str]
    synonyms: ClassVar[tuple[str, ...]]
    options: ClassVar[Mapping[str, str]]

    def refuse(self, pipeline: Pipeline, options: Options) -> str | None:
        """Return the reason why this schedule cannot run this pipeline (given, allowed, nearest), or None."""
        ...

    def placement(self, pipeline: Pipeline) -> Ints:
        """Return the device of each stage, shape (stages,); shape (paths, stages) with several paths."""
        ...

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        """Return the compute order of one device. Micro-batches count from 0 within the pipeline.

        With several paths, the first part of the micro-batches runs along the first path, and so on. With
        `copies`, it is the order of one replica of the device's stages, whose own micro-batches count from 0.
        """
        ...


def paths_of(schedule: Schedule) -> int:
    """Return the number of the schedule's paths over the devices of one pipeline; by default 1."""
    return int(getattr(schedule, "paths", 1))


def searched_options(schedule: Schedule) -> Sequence[Options]:
    """Return the options of the schedule that planners try; by default its defaults alone."""
    return tuple(getattr(schedule, "searched", ({},)))


def contract_of(schedule: Schedule) -> Contract:
    """Return the contract that training by the schedule keeps; by default exact."""
    return Contract(getattr(schedule, "contract", Contract.EXACT))


def is_for_graphs(schedule: Schedule) -> bool:
    """Return True if the schedule is of use only where stages form a graph; by default False."""
    return bool(getattr(schedule, "for_graphs", False))


def deals(schedule: Schedule) -> bool:
    """Return True if the schedule runs stages with unlike numbers of replicas; by default False."""
    return bool(getattr(schedule, "deals", False))


def takes_places(schedule: Schedule) -> bool:
    """Return True if the schedule runs stages where a plan puts them; by default False."""
    return bool(getattr(schedule, "takes_places", False))


def placements(schedule: Schedule, pipeline: Pipeline) -> Ints:
    """Return the device of each stage on each path, shape (paths, stages)."""
    return np.atleast_2d(schedule.placement(pipeline))
