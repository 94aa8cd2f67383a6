"""Plans of parts of a graph: how a dynamic program keeps, joins and compares them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.describe.plan import Recompute

# By degree, the samples in flight of a stage with so many replicas before a part.
Front = tuple[int, ...]


class StageOfLayers(NamedTuple):
    """One stage: its layers, rising, its replicas, its recomputation, its samples in flight, and the kind of
    its devices."""

    layers: tuple[int, ...]
    replicas: int
    recompute: Recompute
    in_flight: int
    kind: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGraph:
    """A partition into stages, in a topological order of the tree.

    Attributes:
        micro_batch_size: samples of a replica's micro-batch.
        sample_s: seconds per sample of the slowest stage, all its replicas together.
        in_flight: the most samples in flight of a first stage.
    """

    stages: tuple[StageOfLayers, ...]
    micro_batch_size: int
    sample_s: float
    in_flight: int

    @property
    def devices(self) -> int:
        return sum(stage.replicas for stage in self.stages)


class StageWay(NamedTuple):
    """One way to run a run of parts as one stage, apart from its samples in flight."""

    kind: int  # of the devices
    degree: int  # index into the degrees
    devices: int  # packed
    recompute: Recompute
    sample_s: float
    resident_bytes: float
    kept_bytes: float


class RunOfParts(NamedTuple):
    """Parts as one stage, which takes `fastest_s` seconds per sample at the least.

    Computing alone takes `least_s`, and longer with more parts.
    """

    layers: tuple[int, ...]
    ways: tuple[StageWay, ...]
    least_s: float
    fastest_s: float


class PartPlan(NamedTuple):
    """A plan of a part: the devices, the front before it, and its stages, one by one behind each other.

    `devices` has a number for each kind, see `packed`.
    """

    devices: int
    front: Front
    stages: Stages | None


class Stages(NamedTuple):
    """A stage with its samples in flight, or other stages, perhaps with other layers; then more stages."""

    stage: tuple[RunOfParts, StageWay, int] | None
    inner: Stages | None
    renamed: Mapping[int, int] | None
    more: Stages | None


MOST_KINDS = 3
# Bits of a number of devices of one kind. The highest is free: it shows where another number is larger.
_BITS = 20
_FREE = sum(1 << _BITS * kind + _BITS - 1 for kind in range(MOST_KINDS))


def packed(kind: int, count: int) -> int:
    """Return a number of devices of one kind as an int; sums of such ints add up kind by kind."""
    return count << _BITS * kind


def is_within(one: int, other: int) -> bool:
    """Return True if one packed number of devices is at most another in every kind."""
    return ((other | _FREE) - one) & _FREE == _FREE


def higher(one: Front, other: Front) -> Front:
    return tuple(map(max, one, other))


def beside(one: PartPlan, other: PartPlan) -> PartPlan:
    """Return the plan of two parts side by side."""
    stages = chained(one.stages, other.stages)
    return PartPlan(one.devices + other.devices, higher(one.front, other.front), stages)


def chained(one: Stages | None, other: Stages | None) -> Stages | None:
    return other if one is None else Stages(None, one, None, other)


def best_of(plans: Iterable[PartPlan], devices: int) -> list[PartPlan]:
    """Return the plans that no other one equals or beats in devices and in its front; equal ones once.

    `devices` are those of all kinds, packed.
    """
    kept: list[PartPlan] = []
    fitting = (one for one in plans if is_within(one.devices, devices))
    # Plans with as few devices of every kind come before the others.
    for plan in sorted(fitting, key=lambda one: one[:2]):
        front, most = plan.front, plan.devices
        if not any(all(map(int.__le__, one.front, front)) and is_within(one.devices, most) for one in kept):
            kept.append(plan)
    return kept


def listed(stages: Stages | None, degrees: Sequence[int]) -> list[StageOfLayers]:
    """Return the stages of a plan, with the layers of their own branches."""
    found: list[StageOfLayers] = []
    waiting: list[tuple[Stages | None, tuple[Mapping[int, int], ...]]] = [(stages, ())]
    while waiting:
        one, renames = waiting.pop()
        if one is None:
            continue
        waiting.append((one.more, renames))
        if one.stage is not None:
            run, way, in_flight = one.stage
            layers = run.layers
            for renamed in renames:
                layers = tuple(renamed[layer] for layer in layers)
            own = tuple(sorted(layers))
            found.append(StageOfLayers(own, degrees[way.degree], way.recompute, in_flight, way.kind))
        else:
            waiting.append((one.inner, renames if one.renamed is None else (one.renamed, *renames)))
    return found
