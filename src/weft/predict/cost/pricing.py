"""Inputs of cost hooks: a program, and tables of times that several hooks share.

A method that cuts stages into segments contributes `SegmentShares`. It knows the content of its segments, and
the part of the computations that its collectives replace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from weft.bundles import parts
from weft.describe.device import Device
from weft.describe.plan import Plan, Recompute
from weft.predict.cost.compute import StageTimes
from weft.predict.cost.exchanges import Exchanges
from weft.predict.cost.layer_times import LayerTimes
from weft.predict.cost.placed_plan import CostModel, PlacedPlan
from weft.program.arrays import Floats, Ints
from weft.program.buffers import last_gradients
from weft.program.codes import distinct_rows
from weft.program.kinds import BACKWARD, is_any_of, is_send
from weft.program.program import NONE, Program
from weft.program.segments import (
    BACKWARD_SEGMENTS,
    CutInSegments,
    StageSegments,
    cutter_of,
    segments_of,
)

# Instructions that run segments of a pass, or complete it.
_FORWARDS = ("forward", "forward_segment")
_BACKWARDS = ("backward", "backward_input", "backward_segment", "input_segment", "weight_segment")


class StageShares(NamedTuple):
    """Parts of a stage's times by segment, in order of the forward pass; each adds up to 1.

    Attributes:
        contained_s: seconds of collectives inside the times of a whole forward, and of a whole backward.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    contained_s: float = 0.0

    @classmethod
    def of_pieces(
        cls,
        pieces: Sequence[LayerTimes],
        recompute: Recompute,
        forward: Sequence[int],
        backward: Sequence[int],
        contained_s: float = 0.0,
    ) -> StageShares:
        """Return the parts from the times of pieces, and the segments of each by direction."""
        # A segment that keeps its inputs alone also runs forward again.
        again = 1.0 if recompute == "full" else 0.0
        return cls(
            _parts_of([one.forward_s for one in pieces], forward),
            _parts_of([one.backward_input_s + again * one.forward_s for one in pieces], backward),
            _parts_of([one.backward_weight_s for one in pieces], backward),
            contained_s,
        )


def _parts_of(seconds: Sequence[float], segment: Sequence[int]) -> tuple[float, ...]:
    """Return each segment's part of a whole, from the times of pieces and the segment of each."""
    total = np.zeros(segment[-1] + 1)
    np.add.at(total, list(segment), seconds)
    whole = float(total.sum())
    found: list[float] = (total / whole if whole else np.full(len(total), 1.0 / len(total))).tolist()
    return tuple(found)


class SegmentExchanges(NamedTuple):
    """The exchanges that stay inside of segments, in order of the forward pass."""

    forward: tuple[Exchanges, ...]
    backward: tuple[Exchanges, ...]


@dataclass(frozen=True, kw_only=True)
class SegmentShares:
    """The division of a stage's times among a method's segments; the method contributes it.

    Attributes:
        shares: of a stage on a device.
        left: the exchanges that stay inside of its segments, given a stage, a replica and its segments.
        taken: the most bytes that a segment of a backward pass takes, of a stage on a device; None: as many
            as the whole pass.
    """

    method: str
    shares: Callable[[Pricing, int, Device], StageShares]
    left: Callable[[Pricing, int, int, StageSegments], SegmentExchanges]
    taken: Callable[[Pricing, int, Device], float] | None = None


@dataclass(frozen=True, kw_only=True)
class SegmentedTimes:
    """The segments of one program, priced by the method that cut its stages."""

    owed: CutInSegments
    priced: SegmentShares
    _left: dict[tuple[int, int], SegmentExchanges] = field(default_factory=dict)

    def times_of(
        self, pricing: Pricing, kind: str, stage: int, part: int, devices: int, times: tuple[StageTimes, ...]
    ) -> tuple[StageTimes, ...]:
        """Return the times, by device, of the part of a stage that one instruction runs."""
        one = self.owed.segments[stage]
        if not one.forward and not one.backward:
            return times
        number = _number(one, kind, part)
        return tuple(
            _own(each, self.priced.shares(pricing, stage, device), kind, number)
            for each, device in zip(times, pricing.placed.device_sets[devices], strict=True)
        )

    def left(self, pricing: Pricing, kind: str, stage: int, replica: int, part: int) -> Exchanges | None:
        """Return the exchanges inside of the part of a stage that one instruction runs; None: of a whole."""
        one = self.owed.segments[stage]
        if kind not in (*_FORWARDS, *_BACKWARDS) or (not one.forward and not one.backward):
            return None
        if (stage, replica) not in self._left:
            self._left[stage, replica] = self.priced.left(pricing, stage, replica, one)
        forward, backward = self._left[stage, replica]
        return (forward if kind in _FORWARDS else backward)[_number(one, kind, part)]


def _number(segments: StageSegments, kind: str, part: int) -> int:
    """Return the number of the segment that an instruction runs; the last one completes a forward pass."""
    return len(segments.forward) if kind == "forward" else part


def _own(times: StageTimes, shares: StageShares, kind: str, number: int) -> StageTimes:
    if kind in _FORWARDS:
        alone_s = max(0.0, times.forward_s - shares.contained_s)
        return replace(times, forward_s=alone_s * shares.forward[number])
    if kind in _BACKWARDS:
        alone_s = max(0.0, times.backward_input_s - shares.contained_s)
        return replace(
            times,
            backward_input_s=alone_s * shares.backward_input[number],
            backward_weight_s=times.backward_weight_s * shares.backward_weight[number],
        )
    return times


def of_whole_passes(program: Program, seconds: Floats) -> Floats:
    """Return seconds by instruction; of a backward that completes a pass in segments, those of the pass.

    Both have shape (instructions,). Exchanges count, except where they overlap with weight parts.
    """
    owed = segments_of(program.obligations.methods)
    if owed is None:
        return seconds
    columns, overlaps = program.columns, any(True in one.split for one in owed.segments)
    exchanges = () if overlaps else (border.kind for one in owed.segments for border in one.backward)
    rows = np.flatnonzero(is_any_of(columns.kind, (BACKWARD, *BACKWARD_SEGMENTS, *exchanges)))
    own = (columns.rank, columns.stage, columns.micro_batch, columns.iteration)
    first, which = distinct_rows(*(one[rows] for one in own))
    totals = np.bincount(which, weights=seconds[rows], minlength=len(first))
    whole = seconds.copy()
    completes = columns.kind[rows] == BACKWARD
    whole[rows[completes]] = totals[which[completes]]
    return whole


def segmented_times(program: Program) -> SegmentedTimes | None:
    """Return the prices of a program's segments; None where all passes are whole."""
    methods = program.obligations.methods
    owed = segments_of(methods)
    if owed is None:
        return None
    priced = next(one for one in parts(SegmentShares) if one.method == cutter_of(methods))
    return SegmentedTimes(owed=owed, priced=priced)


@dataclass(frozen=True, kw_only=True)
class Pricing:
    """A program and its plan on the cluster (`placed`), as input of cost models."""

    program: Program
    placed: PlacedPlan

    @property
    def plan(self) -> Plan:
        return self.placed.plan

    @property
    def model(self) -> CostModel:
        return self.placed.model

    def in_program_s(self, alone_s: float, device: Device, speed: float) -> float:
        """Return seconds of a computation in the program; alone on a device of speed 1 it takes `alone_s`."""
        return (alone_s + self.model.compute.instruction_s(device)) / speed

    def times_of(
        self, kind: str, stage: int, replica: int, part: int, devices: int
    ) -> tuple[StageTimes, ...]:
        """Return the times, by device of a set, of a stage or of the segment that an instruction runs."""
        exchanged_s = self.placed.exchanges_of(stage, replica).of_both(self.plan.stages[stage].recompute)
        times = tuple(one.issued(exchanged_s) for one in self.placed.stage_times[stage, devices])
        if self._segmented is None:
            return times
        return self._segmented.times_of(self, kind, stage, part, devices, times)

    def exchanges_of(self, kind: str, stage: int, replica: int, part: int) -> Exchanges:
        """Return the seconds of exchanges inside of the stage or segment that an instruction runs."""
        left = None if self._segmented is None else self._segmented.left(self, kind, stage, replica, part)
        return self.placed.exchanges_of(stage, replica) if left is None else left

    @cached_property
    def taken_bytes(self) -> Ints:
        """The most bytes that a backward pass takes beside those it keeps; shape (stages, device sets)."""
        taken = None if self._segmented is None else self._segmented.priced.taken
        if taken is None:
            return self.placed.taken_bytes
        table, sets = self.placed.taken_bytes.copy(), self.placed.device_sets
        for stage, devices in self.placed.places:
            table[stage, devices] = round(max(taken(self, stage, one) for one in sets[devices]))
        return table

    @cached_property
    def _segmented(self) -> SegmentedTimes | None:
        return segmented_times(self.program)

    @cached_property
    def completes_gradient(self) -> Ints:
        """By instruction, 1 where ranks of a replica add up their stage's gradient at its end, else 0."""
        completes = np.zeros(len(self.program), dtype=np.int64)
        if self.placed.shape(0).adds_up_gradients:
            for first, end in pairwise(self.program.rank_starts.tolist()):
                completes[list(last_gradients(self.program.columns, range(first, end)))] = 1
        return completes

    @cached_property
    def links(self) -> Ints:
        """Numbers of the two links that each message between nodes occupies, else -1: (instructions, 2).

        The messages of a rank's twins are one flow, with as large a share as any other rank's flow. It
        occupies the links of the first twin that leaves its node.
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
