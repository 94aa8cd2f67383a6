"""What a schedule is: where stages live and in which order a device computes.

A schedule decides nothing else. Sends, receives, reductions and optimizer steps are added by the
compiler, so a new schedule is one file with one class (see `gpipe.py`), registered in this folder's
`__init__` or through the entry-point group `weft.schedules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from weft.program.program import Ints


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One pipeline replica: `devices` in line, `stages` spread over them, `micro_batches` per step."""

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
    """

    name: ClassVar[str]
    synonyms: ClassVar[tuple[str, ...]]
    options: ClassVar[Mapping[str, str]]

    def refuse(self, pipeline: Pipeline, options: Options) -> str | None:
        """Why this schedule cannot run this pipeline (given, allowed, nearest), or None."""
        ...

    def placement(self, pipeline: Pipeline) -> Ints:
        """Device of each stage, shape (stages,)."""
        ...

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        """The compute order of one device. Micro-batches count from 0 within the pipeline replica."""
        ...
