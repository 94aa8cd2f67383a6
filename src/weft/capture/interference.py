"""Interference of a rank's work: host time per instruction, and the slowdowns of overlap.

A small GPT runs as a pipeline over all local ranks. The executor's own work lies between the end of a
computation and the start of the next one. Then every rank repeats the computations of its stage while
messages go round a ring of the ranks. Both are compared with their times alone. Messages in flight take
caches and cores from computations, and computations from messages (Miao et al., Galvatron, VLDB 2023).
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from weft.capture.message_line import MessageLine, open_exchange
from weft.capture.subjects import IN_FLIGHT, one_round, stage_inputs
from weft.capture.timing import Timing, slowest, summarise
from weft.describe.cluster import Cluster
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.plan import Plan
from weft.moves.layout import build_plan, flops_per_layer
from weft.planning.compile import compile_part
from weft.program.kinds import is_compute
from weft.program.rank_program import RankProgram
from weft.run.record.recorder import Recorder
from weft.run.record.slots import read_slots
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stage

MODEL = "gpt-1m"
SEQUENCE = 256
MICRO_BATCH_SIZE = 2
MICRO_BATCHES = 8
STEPS = 16
WARM_UP_STEPS = 4
ROUNDS = 6
MESSAGE_BYTES = 2**20
MESSAGES = 40

EachStep = Callable[[Iterable[int]], Iterable[int]]


@dataclass(frozen=True, slots=True)
class Interference:
    """Host seconds per compute instruction, and slowdowns: overlapped time as a multiple of time alone."""

    instruction_s: float
    compute_slowdown: float
    communication_slowdown: float


def measure_interference(cluster: Cluster, device: torch.device, each_step: EachStep = iter) -> Interference:
    """Measure the slowest rank's figures; all local ranks call it. A single rank has slowdowns of 1.

    `each_step` yields the `STEPS` of a small training, and may count them.
    """
    config = replace(resolve_model(MODEL, sequence=SEQUENCE), layers=2 * dist.get_world_size())
    graph = layer_graph(config)
    plan = _pipeline_plan(cluster, graph)
    program = compile_part(plan, graph, dist.get_rank())
    stages = {
        index: build_stage(config, stage.layers, 0, torch.float32).to(device)
        for index, stage in enumerate(plan.stages)
        if dist.get_rank() in stage.replicas[0].ranks
    }
    records = _recorded(plan, program, stages, config, device, each_step)
    # The median is unaffected by the few computations that wait for another rank.
    gaps_ns = (records["start_ns"][1:] - records["end_ns"][:-1])[np.diff(records["step"]) == 0]
    host_s = slowest(Timing(float(np.median(gaps_ns)) * 1e-9, 0.0)).seconds
    if dist.get_world_size() == 1:
        return Interference(host_s, 1.0, 1.0)
    ((index, stage),) = stages.items()
    layers = plan.stages[index].layers
    inputs = stage_inputs(stage, config, layers[0], MICRO_BATCH_SIZE, torch.float32, device)
    ends = layers[-1] == config.layers + 1
    slowdowns = _slowdowns(stage, inputs, ends)
    compute, communication = (max(1.0, slowest(Timing(factor, 0.0)).seconds) for factor in slowdowns)
    return Interference(host_s, compute, communication)


def _pipeline_plan(cluster: Cluster, graph: LayerGraph) -> Plan:
    job = Job(graph=graph, cluster=cluster, global_batch=MICRO_BATCHES * MICRO_BATCH_SIZE, sequence=SEQUENCE)
    layout = Layout(
        pp=dist.get_world_size(),
        dp=1,
        loops=1,
        micro_batch_size=MICRO_BATCH_SIZE,
        schedule="breadth-first",
    )
    return build_plan(job, layout, flops_per_layer(job))


def _slowdowns(stage: torch.nn.Module, inputs: Sequence[torch.Tensor], ends: bool) -> tuple[float, float]:
    """Return the slowdowns of this rank's computations and of its messages when they overlap.

    All ranks do the same at the same time.
    """
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.0)

    def computed_s() -> float:
        forward_s, backward_s, _ = one_round(stage, optimizer, inputs, ends=ends)
        return forward_s + backward_s

    computed_s()
    dist.barrier()
    compute_s = summarise([computed_s() for _ in range(ROUNDS)]).seconds
    with _ring(inputs[0].device) as messages_s, ThreadPoolExecutor(1) as beside:
        message_s = summarise(messages_s(MESSAGES)[1:]).seconds
        # The same number on every rank, and enough for the rounds, because overlapped messages take longer.
        enough = slowest(Timing(ROUNDS * IN_FLIGHT * compute_s / message_s, 0.0)).seconds
        under_way = beside.submit(messages_s, MESSAGES + math.ceil(enough))
        slow_compute_s = []
        while not under_way.done():
            slow_compute_s.append(computed_s())
        slow_message_s = under_way.result()
    # The messages end during the last round.
    together_s = summarise(slow_compute_s[:-1] or slow_compute_s).seconds
    return together_s / compute_s, summarise(slow_message_s[1:]).seconds / message_s


@contextmanager
def _ring(device: torch.device) -> Iterator[Callable[[int], list[float]]]:
    """Yield a function that passes a number of messages round the ranks and returns the seconds of each.

    It has connections of its own, so it may run in a thread.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    content = torch.zeros(MESSAGE_BYTES // 4, device=device)
    with (
        closing(open_exchange([(rank, after), (before, rank)], device, "interference")) as exchange,
        closing(MessageLine(exchange, after, before, content)) as line,
    ):
        yield partial(_pass_round, line)


def _pass_round(line: MessageLine, messages: int) -> list[float]:
    seconds = []
    for _ in range(messages):
        start = time.perf_counter()
        sent, received = line.send(), line.receive()
        received.wait()
        sent.wait()
        seconds.append(time.perf_counter() - start)
    return seconds


def _recorded(
    plan: Plan,
    program: RankProgram,
    stages: Mapping[int, torch.nn.Module],
    config: ModelConfig,
    device: torch.device,
    each_step: EachStep,
) -> npt.NDArray[np.void]:
    """Return this rank's compute records of a short run in order, without the warm-up."""
    with tempfile.TemporaryDirectory(prefix="weft-interference-") as folder:
        recorder = Recorder(Path(folder), program=program, plan_id=plan.plan_id, steps=STEPS)
        runtime = RankRuntime(
            plan,
            program,
            stages,
            lambda logits, targets: cross_entropy(logits.flatten(0, 1), targets.flatten().to(device)),
            lambda stage: torch.optim.SGD(stage.parameters(), lr=0.0),
            device=device,
            seed=0,
            recorder=recorder,
        )
        tokens = torch.zeros(MICRO_BATCH_SIZE, config.sequence, dtype=torch.long)
        for step in each_step(range(STEPS)):
            _ = runtime.step(step, lambda number: (tokens, tokens)).loss
        runtime.close()
        recorder.close()
        records = read_slots(recorder.path).records
    records = records[records["step"] >= WARM_UP_STEPS]
    return np.sort(
        records[is_compute(program.columns.kind[records["position"] - program.first_row])],
        order=["step", "position"],
    )
