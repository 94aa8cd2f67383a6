"""What the segments of a stage's passes take, of what whole passes take.

A method that cuts stages into segments contributes `SegmentShares`: it knows what is between its borders, and
what its collectives take out of the computations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from weft.bundles import parts
from weft.describe.device import Device
from weft.predict.cost.compute import StageTimes
from weft.predict.cost.exchanges import Exchanges
from weft.program.program import Program
from weft.program.segments import CutInSegments, segments_of

if TYPE_CHECKING:
    from weft.predict.cost.pricing import Pricing


class StageShares(NamedTuple):
    """Parts of a stage's times by segment, in order of the forward pass; each adds up to 1.

    Attributes:
        contained_s: seconds of collectives that times of a whole forward, and of a whole backward, contain.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    contained_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SegmentShares:
    """How a method's segments share a stage's times; the method contributes it.

    Attributes:
        shares: of a stage on a device.
        left: of what the ranks of a replica exchange, given stage and replica, what stays in computations.
    """

    method: str
    shares: Callable[[Pricing, int, Device], StageShares]
    left: Callable[[Pricing, int, int, Exchanges], Exchanges]


@dataclass(frozen=True, kw_only=True)
class SegmentedTimes:
    """The segments of one program, priced by the method that cut its stages."""

    owed: CutInSegments
    priced: SegmentShares

    def times_of(
        self,
        pricing: Pricing,
        kind: str,
        stage: int,
        part: int,
        devices: int,
        times: tuple[StageTimes, ...],
    ) -> tuple[StageTimes, ...]:
        """Times by device of what one instruction runs of a stage."""
        one = self.owed.segments[stage]
        if not one.forward and not one.backward:
            return times
        # What completes a forward pass is its last segment.
        number = len(one.forward) if kind == "forward" else part
        return tuple(
            _own(each, self.priced.shares(pricing, stage, device), kind, number)
            for each, device in zip(times, pricing.placed.device_sets[devices], strict=True)
        )

    def left(self, pricing: Pricing, stage: int, replica: int, exchanges: Exchanges) -> Exchanges:
        one = self.owed.segments[stage]
        if not one.forward and not one.backward:
            return exchanges
        return self.priced.left(pricing, stage, replica, exchanges)


def _own(times: StageTimes, shares: StageShares, kind: str, number: int) -> StageTimes:
    if kind in ("forward", "forward_segment"):
        alone_s = max(0.0, times.forward_s - shares.contained_s)
        return replace(times, forward_s=alone_s * shares.forward[number])
    if kind in ("backward", "backward_segment", "input_segment", "weight_segment"):
        alone_s = max(0.0, times.backward_input_s - shares.contained_s)
        return replace(
            times,
            backward_input_s=alone_s * shares.backward_input[number],
            backward_weight_s=times.backward_weight_s * shares.backward_weight[number],
        )
    return times


def segmented_times(program: Program) -> SegmentedTimes | None:
    """How the segments of a program are priced; None where all passes are whole."""
    owed = segments_of(program.obligations.methods)
    if owed is None:
        return None
    names = {name for name, one in program.obligations.methods.items() if one is owed}
    priced = next(one for one in parts(SegmentShares) if one.method in names)
    return SegmentedTimes(owed=owed, priced=priced)
