"""Shared parts of schedules: the ring of stages, the reading of options, and the turns of 1F1B.

In the ring, stage s is on device s mod P; the last loop may be ragged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from weft.program.arrays import Ints
from weft.program.kinds import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from weft.program.schedules.base import Options, Pipeline


class OnRing:
    """Base class of schedules with a ring of stages, in any order of micro-batches."""

    name: ClassVar[str]
    options: ClassVar[Mapping[str, str]] = {}

    def refuse(self, pipeline: Pipeline, options: Options) -> str | None:
        return refuse_idle_devices(self.name, pipeline)

    def placement(self, pipeline: Pipeline) -> Ints:
        return ring_placement(pipeline)


class OneStagePerDevice(OnRing):
    """Base class of schedules without loops."""

    def refuse(self, pipeline: Pipeline, options: Options) -> str | None:
        return refuse_loops(self.name, pipeline)


def ring_placement(pipeline: Pipeline) -> Ints:
    """Return the device of each stage, shape (stages,)."""
    return np.arange(pipeline.stages, dtype=np.int64) % pipeline.devices


def local_stages(pipeline: Pipeline, device: int) -> Ints:
    """Return the stages of one device, first loop first."""
    return np.arange(device, pipeline.stages, pipeline.devices, dtype=np.int64)


def refuse_idle_devices(name: str, pipeline: Pipeline) -> str | None:
    """Return the reason why a ring with fewer stages than devices is no pipeline, or None."""
    if pipeline.stages >= pipeline.devices:
        return None
    return (
        f"{name} needs a stage for every device, not {pipeline.stages} stages on {pipeline.devices} devices"
    )


def refuse_loops(name: str, pipeline: Pipeline) -> str | None:
    """Return the reason why a schedule of one stage per device cannot run this pipeline, or None."""
    if pipeline.stages == pipeline.devices:
        return None
    return f"{name} runs one stage per device, not {pipeline.stages} stages on {pipeline.devices} devices"


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    return [one for one in range(1, number + 1) if number % one == 0]


def refuse_count(name: str, option: str, options: Options) -> str | None:
    """Return the reason why this option is no whole number of at least 1, or None; it may be absent."""
    value = options.get(option, 1)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return None
    return f"{name}'s {option} is {value!r}; a whole number of at least 1 is allowed"


def count_option(option: str, options: Options, default: int) -> int:
    """Return the value of an option that `refuse_count` accepts."""
    return int(options.get(option, default))


def take_turns(steps: int, warm_up: int) -> tuple[Ints, Ints]:
    """Build an order: `warm_up` forwards, then a forward and a backward in turn, then the other backwards.

    Returns:
        Kind code and number of the step within its kind, both of shape (2 * steps,).
    """
    step = np.arange(steps, dtype=np.int64)
    return in_turn(steps, {FORWARD: np.maximum(2 * (step - warm_up), -1), BACKWARD: 2 * step + 1})


def take_split_turns(steps: int, warm_up: int, weight_lag: int) -> tuple[Ints, Ints]:
    """Build `take_turns` with backwards in two parts; weight part i follows input part i + `weight_lag`.

    Returns:
        Kind code and number of the step within its kind, both of shape (3 * steps,).
    """
    step = np.arange(steps, dtype=np.int64)
    return in_turn(
        steps,
        {
            FORWARD: np.maximum(3 * (step - warm_up), -1),
            BACKWARD_INPUT: 3 * step + 1,
            BACKWARD_WEIGHT: 3 * (step + weight_lag) + 2,
        },
    )


def in_turn(steps: int, turns: Mapping[int, Ints]) -> tuple[Ints, Ints]:
    """Return kind codes and numbers of steps in the order of `turns`: by kind, the turn of each step.

    In one turn, kinds follow each other as they are given, and steps by number.
    """
    sequence = np.argsort(np.concatenate(list(turns.values())), kind="stable")
    kind = np.repeat(np.array(list(turns), dtype=np.int64), steps)
    return kind[sequence], np.tile(np.arange(steps, dtype=np.int64), len(turns))[sequence]
