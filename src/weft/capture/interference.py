"""What running as a pipeline adds to computing alone: host time per instruction, and slower computations.

A small GPT runs as a pipeline over all local ranks. Between the end of a computation and the start of the
next one lies the executor's own work. The computations themselves are compared with the same stages computed
alone: messages on their way take caches and cores from them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from weft.capture.rounds import one_round, stage_inputs
from weft.capture.timing import Timing, slowest, summarise
from weft.describe.cluster import Cluster
from weft.describe.families import layer_graph
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.plan import Plan
from weft.moves.layout import Job, Layout, build_plan, flops_per_layer
from weft.planning.compile import compile_plan
from weft.program.kinds import BACKWARD, FORWARD
from weft.program.program import Program
from weft.run.recorder import Recorder, read_slots
from weft.run.runtime import Runtime
from weft.run.stage_module import StageModule
from weft.run.stages import build_stage
from weft.timeline.streams import is_compute

MODEL = "gpt-1m"
SEQUENCE = 256
MICRO_BATCH_SIZE = 2
MICRO_BATCHES = 8
STEPS = 16
WARM_UP_STEPS = 4
ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Interference:
    """Host seconds per compute instruction, and how many times longer a computation takes in a pipeline."""

    instruction_s: float
    communication_slowdown: float


def measure_interference(cluster: Cluster, device: torch.device) -> Interference:
    """Every local rank calls it and gets the slowest rank's figures; a single rank is slowed by nobody."""
    config = replace(resolve_model(MODEL, sequence=SEQUENCE), layers=2 * dist.get_world_size())
    graph = layer_graph(config)
    plan = _pipeline_plan(cluster, graph)
    program = compile_plan(plan, graph)
    stages = {
        index: build_stage(config, stage.layers, 0, torch.float32).to(device)
        for index, stage in enumerate(plan.stages)
        if dist.get_rank() in stage.replicas[0].ranks
    }
    alone_s = sum(
        _alone_s(config, plan.stages[index].layers, stage, device) for index, stage in stages.items()
    )
    records = _recorded(plan, program, stages, config, device)
    host_s = slowest(Timing(_between_computations(records), 0.0)).seconds
    if dist.get_world_size() == 1:
        return Interference(host_s, 1.0)
    slowdown = slowest(Timing(_computing_s(records, program) / alone_s, 0.0)).seconds
    return Interference(host_s, max(1.0, slowdown))


def _pipeline_plan(cluster: Cluster, graph: LayerGraph) -> Plan:
    job = Job(graph=graph, cluster=cluster, global_batch=MICRO_BATCHES * MICRO_BATCH_SIZE, sequence=SEQUENCE)
    layout = Layout(
        pipeline_parallel=dist.get_world_size(),
        data_parallel=1,
        loops=1,
        micro_batch_size=MICRO_BATCH_SIZE,
        schedule="breadth-first",
    )
    return build_plan(job, layout, flops_per_layer(job))


def _alone_s(
    config: ModelConfig, layers: Sequence[int], stage: torch.nn.Module, device: torch.device
) -> float:
    """Seconds of one micro-batch forward and backward through the stage, all ranks computing at once."""
    inputs = stage_inputs(config, layers[0], MICRO_BATCH_SIZE, torch.float32, device)
    classes = config.vocabulary if layers[-1] == config.layers + 1 else 0
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.0)
    dist.barrier()
    rounds = [one_round(stage, optimizer, inputs, classes) for _ in range(ROUNDS)]
    return summarise([forward + backward for forward, backward, _ in rounds[1:]]).seconds


def _recorded(
    plan: Plan,
    program: Program,
    stages: dict[int, StageModule],
    config: ModelConfig,
    device: torch.device,
) -> npt.NDArray[np.void]:
    """This rank's compute records of a short run, without the warm-up, in order."""
    with tempfile.TemporaryDirectory(prefix="weft-interference-") as folder:
        recorder = Recorder(
            Path(folder), program=program, rank=dist.get_rank(), plan_id=plan.plan_id, steps=STEPS
        )
        runtime = Runtime(
            plan,
            program,
            stages,
            _loss,
            lambda stage: torch.optim.SGD(stage.parameters(), lr=0.0),
            device=device,
            seed=0,
            recorder=recorder,
        )
        tokens = torch.zeros(MICRO_BATCH_SIZE, config.sequence, dtype=torch.long)
        for step in range(STEPS):
            _ = runtime.step(step, lambda number: (tokens, tokens)).loss
        runtime.close()
        recorder.close()
        records = read_slots(recorder.path).records
    records = records[records["step"] >= WARM_UP_STEPS]
    return np.sort(records[is_compute(program.columns.kind[records["position"]])], order=["step", "position"])


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten().to(logits.device))


def _between_computations(records: npt.NDArray[np.void]) -> float:
    """The median leaves out the few computations of a step that wait for another rank."""
    same_step = records["step"][1:] == records["step"][:-1]
    gaps = (records["start_ns"][1:] - records["end_ns"][:-1])[same_step]
    return float(np.median(gaps)) * 1e-9


def _computing_s(records: npt.NDArray[np.void], program: Program) -> float:
    """Mean seconds of a forward plus of a backward: a step is their sum, the delayed ones included."""
    kind = program.columns.kind[records["position"]]
    took = (records["end_ns"] - records["start_ns"]) * 1e-9
    return sum(float(np.mean(took[kind == code])) for code in (FORWARD, BACKWARD))
