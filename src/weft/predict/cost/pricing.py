"""What cost hooks look at: a program, and tables of times that several hooks share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from weft.describe.device import Device
from weft.describe.plan import Plan
from weft.predict.cost.compute import StageTimes
from weft.predict.cost.cost_model import CostModel
from weft.predict.cost.exchanges import Exchanges
from weft.predict.cost.placed_plan import PlacedPlan
from weft.predict.cost.segment_times import SegmentedTimes, segmented_times
from weft.program.buffers import last_gradients
from weft.program.codes import distinct_rows
from weft.program.kinds import is_send
from weft.program.program import NONE, Ints, Program

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Pricing:
    """A program in front of its cost models; `placed` is its plan on the cluster."""

    program: Program
    placed: PlacedPlan

    @property
    def plan(self) -> Plan:
        return self.placed.plan

    @property
    def model(self) -> CostModel:
        return self.placed.model

    def in_program_s(self, alone_s: float, device: Device, speed: float) -> float:
        """Seconds of a computation of the program that takes a device of speed 1 `alone_s` by itself."""
        return (alone_s + self.model.compute.instruction_s(device)) / speed

    def times_of(self, kind: str, stage: int, part: int, devices: int) -> tuple[StageTimes, ...]:
        """Times of a stage by device of a set, or of the segment of it that an instruction runs."""
        times = self.placed.stage_times[stage, devices]
        if self._segmented is None:
            return times
        return self._segmented.times_of(self, kind, stage, part, devices, times)

    def exchanges_of(self, stage: int, replica: int) -> Exchanges:
        """What the ranks of a replica spend on exchanges inside their computations."""
        exchanges = self.placed.exchanges_of(stage, replica)
        return exchanges if self._segmented is None else self._segmented.left(self, stage, replica, exchanges)

    @cached_property
    def _segmented(self) -> SegmentedTimes | None:
        return segmented_times(self.program)

    @cached_property
    def completes_gradient(self) -> Ints:
        """By instruction, 1 where context ranks add up their stage's gradient at its end, else 0."""
        completes = np.zeros(len(self.program), dtype=np.int64)
        if self.placed.shape(0).divides_tokens:
            for first, end in pairwise(self.program.rank_starts.tolist()):
                completes[list(last_gradients(self.program.columns, range(first, end)))] = 1
        return completes

    @cached_property
    def links(self) -> Ints:
        """Numbers of the two links that each message between nodes occupies, else -1: (instructions, 2).

        The messages of a rank's twins are one flow here, with as large a share as that of any other rank, on
        the links of the first of them that leaves its node.
        """
        columns = self.program.columns
        links = np.full((len(columns), 2), NONE, dtype=np.int64)
        sends = np.flatnonzero(is_send(columns.kind))
        ranks, peers = columns.rank[sends], columns.peer[sends]
        first, which = distinct_rows(ranks, peers)
        pairs = zip(ranks[first].tolist(), peers[first].tolist(), strict=True)
        table = [self.placed.links.messages[pair].links for pair in pairs]
        links[sends] = np.array(table, dtype=np.int64).reshape(-1, 2)[which]
        return links
