"""The order of stages on the devices that a plan gives them: any graph, any number on each device.

A list scheduler runs the step before. A device takes the earliest backward pass that is ready, else the
earliest forward pass. So it is 1F1B (Narayanan et al., arXiv 2104.04473) for any placement. All devices
follow one such run, so they never wait for each other in a circle. A placement of operators (Baechi, SoCC
2020) becomes a pipeline in this order.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from heapq import heappop, heappush
from typing import ClassVar

import numpy as np

from weft.program.arrays import Ints
from weft.program.kinds import BACKWARD, FORWARD
from weft.program.schedules.base import ComputeOrder, Options, Pipeline
from weft.program.schedules.ring import count_option, refuse_count, refuse_idle_devices, ring_placement


class PlacedOrder:
    """Stages on the devices of the plan; ready backward passes first, then ready forward passes."""

    name: ClassVar[str] = "placed"
    synonyms: ClassVar[tuple[str, ...]] = ("device_map", "baechi")
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
        return _orders(pipeline, places, tuple(map(int, words)), in_flight)[device]


# Every device of a pipeline asks for its own part of one run.
@lru_cache(maxsize=8)
def _orders(
    pipeline: Pipeline, places: tuple[int, ...], times: tuple[int, ...], in_flight: int
) -> list[ComputeOrder]:
    """Return the compute order of every device."""
    run = _ListedStep(pipeline, places, times, in_flight)
    run.finish()
    return [ComputeOrder(*np.array(passes, dtype=np.int64).reshape(-1, 3).T.copy()) for passes in run.orders]


class _ListedStep:
    """One step by the list scheduler, without times of messages. A backward pass takes two forward passes."""

    def __init__(
        self, pipeline: Pipeline, places: tuple[int, ...], times: tuple[int, ...], in_flight: int
    ) -> None:
        stages = range(pipeline.stages)
        self.orders: list[list[tuple[int, int, int]]] = [[] for _ in range(pipeline.devices)]
        self._places, self._times, self._micro_batches = places, times, pipeline.micro_batches
        self._readers: list[list[int]] = [[] for _ in stages]
        self._producers: list[list[int]] = [[] for _ in stages]
        for producer, reader in pipeline.stage_edges:
            self._readers[producer].append(reader)
            self._producers[reader].append(producer)
        # A pass waits for so many others: a backward pass also for the forward pass of its stage.
        self._missing = {
            (kind, stage, number): len(before[stage]) + (kind == BACKWARD)
            for kind, before in ((FORWARD, self._producers), (BACKWARD, self._readers))
            for stage in stages
            for number in range(pipeline.micro_batches)
        }
        self._left = [pipeline.stages] * pipeline.micro_batches
        self._begun = 0
        self._ready: list[list[tuple[int, int, int]]] = [[] for _ in self.orders]
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
        key = (0, number, -stage) if kind == BACKWARD else (1, number, stage)
        heappush(self._ready[self._places[stage]], key)

    def _start_all(self, now: int) -> None:
        for device, ready in enumerate(self._ready):
            if ready and not self._busy[device]:
                turn, number, key = heappop(ready)
                kind, stage = (BACKWARD, -key) if turn == 0 else (FORWARD, key)
                self._busy[device] = True
                self.orders[device].append((kind, stage, number))
                taken = self._times[stage] * (2 if kind == BACKWARD else 1)
                heappush(self._running, (now + taken, kind, stage, number))

    def _end(self, kind: int, stage: int, number: int) -> None:
        self._busy[self._places[stage]] = False
        if kind == FORWARD:
            self._arrive(BACKWARD, stage, number)
        for other in self._readers[stage] if kind == FORWARD else self._producers[stage]:
            self._arrive(kind, other, number)
        if kind == BACKWARD:
            self._left[number] -= 1
            if not self._left[number]:
                self._begin()

    def _arrive(self, kind: int, stage: int, number: int) -> None:
        self._missing[kind, stage, number] -= 1
        if not self._missing[kind, stage, number]:
            self._enter(kind, stage, number)
