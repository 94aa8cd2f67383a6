"""What benchmarks of sleeping stages share: stages, plans and the execution of steps.

A sleeping stage sleeps to absolute deadlines instead of computing, so that durations are exact and waits show
even where several ranks share a core. Everything else is real: processes, messages, gradients, reductions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from weft.describe.amount import Amount
from weft.describe.layer import Layer
from weft.describe.layer_graph import LayerGraph, chain_edges
from weft.describe.plan import Choice, Plan, Replica, Stage
from weft.planning.compile import compile_plan
from weft.program.program import Program
from weft.program.rank_program import part_of
from weft.program.schedules import get_schedule
from weft.program.schedules.base import Pipeline, placements
from weft.run.parallel.function import Function
from weft.run.record.recorder import Recorder
from weft.run.record.slots import read_slots
from weft.run.runtime import RankRuntime

# A late wake-up shorter than this does not move the next deadline.
JITTER_S = 0.005
LAYER_KIND = "sleep"


@dataclass(frozen=True, slots=True)
class Case:
    """An order of micro-batches: `loops` stages per device, `micro_batches` per replica and step."""

    schedule: str
    loops: int
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.schedule}, loops {self.loops}, micro-batches {self.micro_batches}"


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """How long a stage sleeps for one micro-batch; a whole backward takes both of its parts."""

    forward: float
    backward_input: float
    backward_weight: float


class Deadline:
    """The end of this rank's last sleep; shared by its stages."""

    def __init__(self) -> None:
        self._last = 0.0

    def sleep(self, seconds: float) -> None:
        now = time.monotonic()
        begin = self._last if now - self._last < JITTER_S else now
        self._last = begin + seconds
        time.sleep(max(0.0, self._last - now))


class Sleeping(Function):
    """The same values, later."""

    @staticmethod
    def forward(
        context: Any, values: torch.Tensor, deadline: Deadline, forward_s: float, backward_s: float
    ) -> torch.Tensor:
        context.deadline, context.backward_s = deadline, backward_s
        if forward_s:
            deadline.sleep(forward_s)
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        context.deadline.sleep(context.backward_s)
        return gradient, None, None, None


class SleepingStage(nn.Module):
    """A shift, a scale and a sleep, with `parameters` parameters in all, at least 2.

    The shift lies on the way to the input, so that the input part of a first stage has a way to go, too.
    """

    def __init__(self, deadline: Deadline, seconds: StageSeconds, parameters: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))
        self.scale = nn.Parameter(torch.ones(parameters - 1))
        self._deadline, self._seconds = deadline, seconds

    def input_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        return (micro_batch_size, sequence)

    output_shape = input_shape

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        seconds = self._seconds
        scale = Sleeping.apply(self.scale[:1], self._deadline, 0.0, seconds.backward_weight)
        scaled = (values + self.shift) * scale
        slept: torch.Tensor = Sleeping.apply(scaled, self._deadline, seconds.forward, seconds.backward_input)
        return slept


def sleeping_graph(
    stages: int, parameters: int, edges: tuple[tuple[int, int], ...] | None = None
) -> LayerGraph:
    """Equal layers, one for each stage; a chain without `edges`."""
    one = Amount.of(1.0, batch=1, sequence=1)
    return LayerGraph(
        name="sleep",
        layers=tuple(
            Layer(name=f"sleep.{index}", kind=LAYER_KIND, parameters=Amount.of(parameters), sent=one)
            for index in range(stages)
        ),
        edges=chain_edges(stages) if edges is None else edges,
        sequence=1,
    )


def sleeping_plan(case: Case, graph: LayerGraph, devices: int, replicas: int = 1) -> Plan:
    """Rank r is device r mod `devices` of pipeline r div `devices`; there are `replicas` pipelines."""
    pipeline = Pipeline(devices, devices * case.loops, case.micro_batches)
    places = placements(get_schedule(case.schedule), pipeline)
    share = case.micro_batches // len(places)
    return Plan(
        model=graph.name,
        model_fingerprint=graph.fingerprint,
        cluster="sleepers",
        cluster_fingerprint="0" * 16,
        sequence=graph.sequence,
        global_batch=replicas * case.micro_batches,
        micro_batch_size=1,
        mesh={"dp": replicas, "pp": devices},
        stages=tuple(
            Stage(
                layers=(index,),
                replicas=tuple(
                    Replica(ranks=(replica * devices + place,), micro_batches=share)
                    for replica in range(replicas)
                    for place in on_paths
                ),
            )
            for index, on_paths in enumerate(places.T.tolist())
        ),
        schedule=Choice(name=case.schedule),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleepers:
    """A plan of sleeping stages and its program; all ranks of the job make one and run it together.

    `features`: of a sample.
    """

    plan: Plan
    program: Program
    seconds: StageSeconds
    parameters: int
    make_stage: Callable[[int, Deadline], nn.Module]
    features: int = 1

    @classmethod
    def of(
        cls, case: Case, seconds: StageSeconds, *, devices: int, replicas: int = 1, parameters: int = 2
    ) -> Sleepers:
        """`parameters` and `seconds` are those of each stage."""
        graph = sleeping_graph(devices * case.loops, parameters)
        plan = sleeping_plan(case, graph, devices, replicas)
        return cls(
            plan=plan,
            program=compile_plan(plan, graph),
            seconds=seconds,
            parameters=parameters,
            make_stage=lambda index, deadline: SleepingStage(deadline, seconds, parameters),
        )

    @property
    def graph(self) -> LayerGraph:
        return sleeping_graph(len(self.plan.stages), self.parameters)

    def run(self, steps: int, folder: Path, generation: int, *, together: bool) -> npt.NDArray[np.void]:
        """Train for some steps and return this rank's records; `together`: each step waits for all ranks."""
        rank, deadline = dist.get_rank(), Deadline()
        stages = {
            index: self.make_stage(index, deadline)
            for index, stage in enumerate(self.plan.stages)
            if any(rank in copy.ranks for copy in stage.replicas)
        }
        part = part_of(self.program, rank)
        recorder = Recorder(folder, program=part, plan_id=self.plan.plan_id, steps=steps)
        runtime = RankRuntime(
            self.plan,
            part,
            stages,
            lambda values, targets: values.mean(),
            lambda stage: torch.optim.SGD(stage.parameters(), lr=0.0),
            device="cpu",
            seed=0,
            recorder=recorder,
            generation=generation,
        )
        ones = torch.ones(1, self.features)
        results = []
        for step in range(steps):
            if together:
                dist.barrier()
            results.append(runtime.step(step, lambda number: (ones, ones)))
        for result in results:
            _ = result.loss
        runtime.close()
        recorder.close()
        return read_slots(recorder.path).records


def makespan_s(records: npt.NDArray[np.void]) -> float:
    """From the first begin of any rank's records of one step to the last one's end; all ranks call it."""
    ends = torch.tensor([-int(records["start_ns"].min()), int(records["end_ns"].max())])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    return int(ends.sum()) * 1e-9
