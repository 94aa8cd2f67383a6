"""A rank's memory at its peak, part by part, with the origin and the interval of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from weft.describe.device import Device
from weft.predict.cost.memory import ALLOCATOR_SLACK
from weft.predict.cost.placed_plan import PlacedPlan
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import LIVE_SPREAD, Held, held_bytes, live_parts
from weft.predict.predict import PredictedStep
from weft.predict.simulator import at_peak
from weft.program.program import Program

BY_LAYER = "counted by layer"
ASSUMED = "assumed"
GIVEN = "given"


class MemoryPart(NamedTuple):
    """Bytes of one kind on a rank at its peak.

    Attributes:
        spread: relative half-width of the 90 % interval.
        source: the origin of the figure, in words.
    """

    name: str
    value: float
    spread: float
    source: str


def memory_parts(placed: PlacedPlan, program: Program, step: PredictedStep, rank: int) -> list[MemoryPart]:
    """Return the parts of a rank's predicted peak, largest first.

    Their sum is the peak, up to rounding. The allocator's share is a part of its own, and the correction by
    measured peaks another.
    """
    pricing = Pricing(program=program, placed=placed)
    found = held_parts(held_bytes(pricing), rank)
    peak = at_peak(program, step.priced.costs, step.simulation, rank)
    allocated = {name: int(change[peak.rows].sum()) for name, change in live_parts(pricing).items()}
    allocated["temporaries"] = peak.working_bytes
    found += [
        MemoryPart(name, each / (1.0 + ALLOCATOR_SLACK), LIVE_SPREAD, BY_LAYER)
        for name, each in allocated.items()
    ]
    counted = sum(one.value for one in found)
    found.append(MemoryPart("allocator", ALLOCATOR_SLACK * counted, 0.0, ASSUMED))
    memory = step.priced.memory
    if memory.count:
        more = (memory.factor - 1.0) * sum(one.value for one in found)
        found = [one._replace(spread=memory.factor * memory.widening * one.spread) for one in found]
        found.append(MemoryPart("correction", more, 0.0, memory.in_words()))
    return sorted((one for one in found if round(one.value)), key=lambda one: -one.value)


def held_parts(held: Mapping[str, Held], rank: int) -> list[MemoryPart]:
    """Return the parts that a rank holds all the time, without the allocator's share."""
    return [
        MemoryPart(name.replace("_", " "), float(each[rank]), one.spread, one.source)
        for what, one in held.items()
        for name, each in (one.parts or {what: one.value}).items()
        if each[rank]
    ]


def reserve_part(device: Device) -> MemoryPart:
    """Return the memory of a device that no plan gets."""
    source = ASSUMED if device.reserve_bytes is None else GIVEN
    return MemoryPart("reserve", device.memory_bytes - device.usable_bytes, 0.0, source)
