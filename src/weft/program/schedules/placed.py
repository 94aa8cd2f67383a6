"""The orders of stages on the devices that a plan gives them: any graph, any number on each device.

A list scheduler runs the step before. A device takes the earliest backward pass that is ready, else the
earliest forward pass. So it is 1F1B (Narayanan et al., arXiv 2104.04473) for any placement. All devices
follow one such run, so they never wait for each other in a circle. A placement of operators (Baechi, SoCC
2020) becomes a pipeline in this order.

With split backward passes, weight parts fill the waits, as in zero-bubble orders (Qi et al., arXiv
2401.10241). They come first only where a device keeps as many micro-batches as may be under way.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from heapq import heappop, heappush
from typing import ClassVar

import numpy as np

from weft.program.arrays import Ints
from weft.program.kinds import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from weft.program.schedules.base import ComputeOrder, Options, Pipeline
from weft.program.schedules.ring import count_option, refuse_count, refuse_idle_devices, ring_placement


class PlacedOrder:
    """Stages on the devices of the plan; ready backward passes first, then ready forward passes."""

    name: ClassVar[str] = "placed"
    synonyms: ClassVar[tuple[str, ...]] = ("device_map", "baechi")
    splits: ClassVar[bool] = False
    options: ClassVar[Mapping[str, str]] = {
        "in_flight": "micro-batches under way at once; default: the number of devices",
        "times": "relative times of the stages' forward passes, whole numbers; default: equal",
    }
    takes_places: ClassVar[bool] = True

    def refuse(self, pipeline: Pipeline, options: Options) -> str | None:
        """Return the reason why the options or too few stages make no order, or None."""
        reason = refuse_idle_devices(self.name, pipeline) or refuse_count(self.name, "in_flight", options)
        if reason is not None or "times" not in options:
            return reason
        words = str(options["times"]).split()
        if len(words) == pipeline.stages and all(word.isdecimal() and int(word) for word in words):
            return None
        needed = f"{pipeline.stages} whole numbers of at least 1, with blanks between"
        return f"{self.name}'s times are {options['times']!r}; {needed} are allowed"

    def placement(self, pipeline: Pipeline) -> Ints:
        """Return the plan's device of each stage; round the devices in a ring where no plan gives them."""
        if pipeline.places is None:
            return ring_placement(pipeline)
        return np.array(pipeline.places, dtype=np.int64)

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        """Return the passes of a device in the order of the list scheduler's run."""
        words = str(options.get("times", "1 " * pipeline.stages)).split()
        in_flight = count_option("in_flight", options, pipeline.devices)
        places = tuple(self.placement(pipeline).tolist())
        return _orders(pipeline, places, tuple(map(int, words)), in_flight, self.splits)[device]


class PlacedZeroBubble(PlacedOrder):
    """Splits backward passes, and runs weight parts where a device would wait."""

    name: ClassVar[str] = "placed-zb"
    synonyms: ClassVar[tuple[str, ...]] = ("placed-zero-bubble",)
    splits: ClassVar[bool] = True


# A ready pass: 0 for a part of a backward pass, else 1; its micro-batch; its stage, negative for the former.
_Ready = tuple[int, int, int]


# Every device of a pipeline asks for its own part of one run.
@lru_cache(maxsize=8)
def _orders(
    pipeline: Pipeline, places: tuple[int, ...], times: tuple[int, ...], in_flight: int, splits: bool
) -> list[ComputeOrder]:
    """Return the compute order of every device."""
    run = _ListedStep(pipeline, places, times, in_flight, splits=splits)
    run.finish()
    return [ComputeOrder(*np.array(passes, dtype=np.int64).reshape(-1, 3).T.copy()) for passes in run.orders]


class _ListedStep:
    """One step by the list scheduler, without times of messages. A part of a backward pass takes as long as a
    forward pass."""

    def __init__(
        self,
        pipeline: Pipeline,
        places: tuple[int, ...],
        times: tuple[int, ...],
        in_flight: int,
        *,
        splits: bool,
    ) -> None:
        stages = range(pipeline.stages)
        self.orders: list[list[tuple[int, int, int]]] = [[] for _ in range(pipeline.devices)]
        self._places, self._times, self._micro_batches = places, times, pipeline.micro_batches
        # The kind that hands a gradient on, and the times of each kind in those of a forward pass.
        self._backward = BACKWARD_INPUT if splits else BACKWARD
        self._takes = {FORWARD: 1, self._backward: 1 if splits else 2, BACKWARD_WEIGHT: 1}
        self._readers: list[list[int]] = [[] for _ in stages]
        self._producers: list[list[int]] = [[] for _ in stages]
        for producer, reader in pipeline.stage_edges:
            self._readers[producer].append(reader)
            self._producers[reader].append(producer)
        # A pass waits for so many others: a backward pass also for the forward pass of its stage.
        self._missing = {
            (kind, stage, number): len(before[stage]) + (kind != FORWARD)
            for kind, before in ((FORWARD, self._producers), (self._backward, self._readers))
            for stage in stages
            for number in range(pipeline.micro_batches)
        }
        self._left = [pipeline.stages] * pipeline.micro_batches
        self._begun = 0
        self._ready: list[list[_Ready]] = [[] for _ in self.orders]
        self._weights: list[list[_Ready]] = [[] for _ in self.orders]
        # Of each device: micro-batches that its stages keep, and how many they may.
        self._kept = [0] * pipeline.devices
        self._most = [in_flight * places.count(device) for device in range(pipeline.devices)]
        self._running: list[tuple[int, int, int, int]] = []
        self._busy = [False] * pipeline.devices
        for _ in range(min(in_flight, pipeline.micro_batches)):
            self._begin()

    def finish(self) -> None:
        """Run until every pass has ended."""
        now = 0
        self._start_all(now)
        while self._running:
            now = self._running[0][0]
            while self._running and self._running[0][0] == now:
                self._end(*heappop(self._running)[1:])
            self._start_all(now)

    def _begin(self) -> None:
        """Let the next micro-batch enter the stages that read no other."""
        if self._begun < self._micro_batches:
            for stage, producers in enumerate(self._producers):
                if not producers:
                    self._enter(FORWARD, stage, self._begun)
            self._begun += 1

    def _enter(self, kind: int, stage: int, number: int) -> None:
        """Put a ready pass behind those of earlier micro-batches; backward passes come first."""
        key = (1, number, stage) if kind == FORWARD else (0, number, -stage)
        heappush((self._weights if kind == BACKWARD_WEIGHT else self._ready)[self._places[stage]], key)

    def _start_all(self, now: int) -> None:
        for device, busy in enumerate(self._busy):
            if not busy and (chosen := self._choose(device)) is not None:
                kind, stage, number = chosen
                self._busy[device] = True
                self._kept[device] += kind == FORWARD
                self.orders[device].append(chosen)
                heappush(self._running, (now + self._takes[kind] * self._times[stage], kind, stage, number))

    def _choose(self, device: int) -> tuple[int, int, int] | None:
        """Return the next pass of a device that waits for nothing, or None."""
        ready, weights = self._ready[device], self._weights[device]
        no_room = bool(ready) and ready[0][0] == 1 and self._kept[device] >= self._most[device]
        if weights and (not ready or no_room):
            _, number, key = heappop(weights)
            return BACKWARD_WEIGHT, -key, number
        if not ready:
            return None
        turn, number, key = heappop(ready)
        return (FORWARD, key, number) if turn else (self._backward, -key, number)

    def _end(self, kind: int, stage: int, number: int) -> None:
        device = self._places[stage]
        self._busy[device] = False
        self._kept[device] -= kind in (BACKWARD, BACKWARD_WEIGHT)
        if kind == BACKWARD_WEIGHT:
            return
        if kind == FORWARD:
            self._arrive(self._backward, stage, number)
        elif kind == BACKWARD_INPUT:
            self._enter(BACKWARD_WEIGHT, stage, number)
        for other in self._readers[stage] if kind == FORWARD else self._producers[stage]:
            self._arrive(kind, other, number)
        if kind != FORWARD:
            self._left[number] -= 1
            if not self._left[number]:
                self._begin()

    def _arrive(self, kind: int, stage: int, number: int) -> None:
        self._missing[kind, stage, number] -= 1
        if not self._missing[kind, stage, number]:
            self._enter(kind, stage, number)
