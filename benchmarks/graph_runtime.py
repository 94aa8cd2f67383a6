"""Does a graph of stages gain what the simulator says? Towers, executed for real.

Towers run side by side and end in common stages. The same layers are also flattened into a chain, in which
each tower waits for the one before. A step of the graph is compared with a step of the chain: the gain, and
the one that the simulator predicts.

On 4 and 8 ranks, stages sleep, and each rank has one. The graph runs in GraphPipe's order, the chain in 1F1B.
The recorder tells how many micro-batches each stage holds between the begin of a forward and the end of its
backward pass.

On 2 ranks, towers compute, each rank on a core of its own. A rank has several stages, so both run
breadth-first. The simulator takes the times of the chain's stages. Both run in turn, and their shortest steps
count, because other work on the cores makes steps longer.

    python benchmarks/graph_runtime.py            # 4 ranks
    python benchmarks/graph_runtime.py --ranks 8
    python benchmarks/graph_runtime.py --ranks 2
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from figures import Value
from harness import Report, parser_of_ranks, run_on_ranks
from sleeping import (
    Case,
    Deadline,
    Sleepers,
    Sleeping,
    StageSeconds,
    makespan_s,
    sleeping_graph,
    sleeping_plan,
)
from torch import nn

from weft.describe.layer_graph import LayerGraph, chain_edges
from weft.planning.compile import compile_plan
from weft.predict.abstract import PassTimes, simulate_schedule
from weft.program.kinds import BACKWARD, FORWARD, STEP, is_compute
from weft.program.schedules.graph_1f1b import samples_in_flight
from weft.run.launch.worker_start import start_worker
from weft.run.stage.graph_stage import GraphStage
from weft.run.stage.layers import LayerFunction
from weft.timeline.figures import prediction_error

Edges = tuple[tuple[int, int], ...]

FORWARD_S, BACKWARD_S = 0.040, 0.080
STEPS, WARM_UP_STEPS = 6, 1
TARGET = 0.05
GRAPH, CHAIN, LOOPED = "graph-1f1b", "1f1b", "breadth-first"
# Of the towers that compute, a sample as a matrix, and the products of a forward pass.
ROWS, WIDTH, PRODUCTS = 96, 768, 4
COMPUTED_STEPS, ROUNDS = 20, 4


class Towers(NamedTuple):
    """As many towers as `width`, each of `depth` stages, and `joined` stages behind them."""

    width: int
    depth: int
    joined: int
    micro_batches: int

    def __str__(self) -> str:
        depth = f"{self.depth} stage{'s' if self.depth > 1 else ''}"
        return f"{self.width} towers of {depth}, {self.joined} behind, {self.micro_batches} micro-batches"

    @property
    def stages(self) -> int:
        return self.width * self.depth + self.joined

    @property
    def edges(self) -> Edges:
        first_joined = self.width * self.depth
        found = []
        for stage in range(self.stages - 1):
            ends_tower = stage < first_joined and (stage + 1) % self.depth == 0
            found.append((stage, first_joined if ends_tower else stage + 1))
        return tuple(sorted(found))


PINNED = 2
CASES = {
    PINNED: (Towers(2, 1, 2, 2), Towers(2, 1, 2, 4), Towers(4, 1, 2, 2), Towers(4, 1, 2, 4)),
    4: (Towers(2, 1, 2, 2), Towers(2, 1, 2, 8), Towers(3, 1, 1, 4)),
    8: (Towers(2, 3, 2, 4), Towers(2, 3, 2, 8), Towers(4, 1, 4, 8), Towers(4, 1, 4, 16)),
}


class TowerStage(GraphStage, nn.Module):
    """A stage of one layer, which adds up what it reads, and sleeps."""

    def __init__(self, index: int, deadline: Deadline, *, graph: LayerGraph, seconds: StageSeconds) -> None:
        nn.Module.__init__(self)
        self.scale = nn.Parameter(torch.ones(1))
        self._deadline, self._seconds = deadline, seconds
        self.wire(graph, (index,), [(1,)] * len(graph.layers))

    def layer_functions(self, inputs: torch.Tensor) -> Sequence[LayerFunction]:
        return [self._slept]

    def _slept(self, *values: torch.Tensor) -> torch.Tensor:
        seconds = self._seconds
        scale = Sleeping.apply(self.scale, self._deadline, 0.0, seconds.backward_weight)
        scaled = torch.stack(values).sum(0) * scale
        slept: torch.Tensor = Sleeping.apply(scaled, self._deadline, seconds.forward, seconds.backward_input)
        return slept


class ComputingStage(GraphStage, nn.Module):
    """A tower of products of matrices, or a stage behind towers, which adds up what it reads."""

    def __init__(self, index: int, _: Deadline, *, graph: LayerGraph, towers: Towers) -> None:
        nn.Module.__init__(self)
        count = PRODUCTS if index < towers.width * towers.depth else 0
        self.weights = nn.ParameterList(torch.eye(WIDTH) for _ in range(count))
        self.scale = nn.Parameter(torch.ones(1))
        self.wire(graph, (index,), [(ROWS * WIDTH,)] * len(graph.layers))

    def layer_functions(self, inputs: torch.Tensor) -> Sequence[LayerFunction]:
        return [self._computed]

    def _computed(self, *values: torch.Tensor) -> torch.Tensor:
        found = (torch.stack(values).sum(0) * self.scale).view(ROWS, WIDTH)
        for weight in self.weights:
            found = torch.tanh(found @ weight)
        return found.view(1, ROWS * WIDTH)


def computing(towers: Towers, edges: Edges) -> Sleepers:
    """The towers as a graph or as a chain, several stages on each of two ranks."""
    graph = sleeping_graph(towers.stages, 1, edges)
    plan = sleeping_plan(Case(LOOPED, towers.stages // PINNED, towers.micro_batches), graph, PINNED)
    return Sleepers(
        plan=plan,
        program=compile_plan(plan, graph),
        seconds=StageSeconds(0.0, 0.0, 0.0),
        parameters=1,
        make_stage=partial(ComputingStage, graph=graph, towers=towers),
        features=ROWS * WIDTH,
    )


def sleepers_of(towers: Towers, schedule: str) -> Sleepers:
    """The towers in GraphPipe's order, or flattened into a chain for 1F1B."""
    graph = sleeping_graph(towers.stages, 1, edges_of(towers, schedule))
    plan = sleeping_plan(Case(schedule, 1, towers.micro_batches), graph, towers.stages)
    seconds = StageSeconds(FORWARD_S, BACKWARD_S / 2, BACKWARD_S / 2)
    return Sleepers(
        plan=plan,
        program=compile_plan(plan, graph),
        seconds=seconds,
        parameters=1,
        make_stage=partial(TowerStage, graph=graph, seconds=seconds),
    )


def edges_of(towers: Towers, schedule: str) -> Edges:
    return towers.edges if schedule == GRAPH else chain_edges(towers.stages)


def simulated_s(towers: Towers, schedule: str) -> float:
    figures = simulate_schedule(
        schedule,
        devices=towers.stages,
        micro_batches=towers.micro_batches,
        forward=FORWARD_S,
        backward=BACKWARD_S,
        edges=edges_of(towers, schedule),
    )
    return float(figures.makespan)


class Steps(NamedTuple):
    """By step behind the warm-up, this rank's records of passes, with their kinds and stages."""

    records: list[np.ndarray]
    kinds: list[np.ndarray]
    stages: list[np.ndarray]

    def makespans_s(self) -> list[float]:
        """Of every step; all ranks call it."""
        return list(map(makespan_s, self.records))


def run(sleepers: Sleepers, steps: int, generation: int) -> Steps:
    with tempfile.TemporaryDirectory(prefix="weft-towers-") as folder:
        records = sleepers.run(steps, Path(folder), generation, together=True)
    columns = sleepers.program.columns
    kind, stage = columns.kind[records["position"]], columns.stage[records["position"]]
    passes = is_compute(kind) & (kind != STEP)
    found = [passes & (records["step"] == step) for step in range(WARM_UP_STEPS, steps)]
    return Steps([records[one] for one in found], [kind[one] for one in found], [stage[one] for one in found])


def held_by_ranks(steps: Steps) -> list[int]:
    """The most micro-batches that each rank holds in any step; all ranks call it."""
    most = max(map(most_held, steps.records, steps.kinds))
    return _of_all_ranks(torch.tensor([most]))


def stage_times(steps: Steps, stages: int) -> list[PassTimes]:
    """The least times of the passes of every stage; all ranks call it."""
    records, kind, stage = (np.concatenate(each) for each in steps)
    lengths = records["end_ns"] - records["start_ns"]
    own = torch.zeros(2 * stages, dtype=torch.int64)
    for place in range(2 * stages):
        mine = (stage == place // 2) & (kind == (FORWARD, BACKWARD)[place % 2])
        if mine.any():
            own[place] = int(lengths[mine].min())
    dist.all_reduce(own)
    ns = [Fraction(one, 10**9) for one in own.tolist()]
    return [PassTimes(ns[2 * one], ns[2 * one + 1]) for one in range(stages)]


def _of_all_ranks(value: torch.Tensor) -> list[int]:
    of_all = [torch.zeros_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, value)
    return [int(one) for one in of_all]


def most_held(records: np.ndarray, kind: np.ndarray) -> int:
    begins, ends = records["start_ns"][kind == FORWARD], records["end_ns"][kind == BACKWARD]
    times = np.concatenate([begins, ends])
    change = np.concatenate([np.ones(len(begins)), -np.ones(len(ends))])
    return int(np.cumsum(change[np.argsort(times, kind="stable")]).max(initial=0))


def compared(chain_s: float, graph_s: float, gain: float) -> dict[str, Value]:
    error = prediction_error(gain, chain_s / graph_s)
    return {
        "chain": Value(chain_s, "s"),
        "graph": Value(graph_s, "s"),
        "gain": Value(chain_s / graph_s, "ratio"),
        "simulated": Value(gain, "ratio"),
        "error": Value(error, "share", TARGET, met=abs(error) <= TARGET),
    }


def sleeping(towers: Towers, generation: int) -> dict[str, Value]:
    """Towers that sleep, one stage on each rank."""
    chain_s = statistics.median(run(sleepers_of(towers, CHAIN), STEPS, generation).makespans_s())
    steps = run(sleepers_of(towers, GRAPH), STEPS, generation + 1)
    count = towers.stages
    kept = samples_in_flight(towers.edges, (1,) * count, (1,) * count, towers.micro_batches)
    unlike = sum(one != other for one, other in zip(held_by_ranks(steps), kept, strict=True))
    gain = simulated_s(towers, CHAIN) / simulated_s(towers, GRAPH)
    found = compared(chain_s, statistics.median(steps.makespans_s()), gain)
    return {**found, "stages with others in flight": Value(unlike, "count", target=0)}


def pinned(towers: Towers, generation: int) -> dict[str, Value]:
    """Towers that compute, several stages on each of two ranks, which have a core each."""
    edges = chain_edges(towers.stages)
    chain, graph = Steps([], [], []), Steps([], [], [])
    for turn in range(ROUNDS):
        for number, (steps, each) in enumerate(((chain, edges), (graph, towers.edges))):
            place = 2 * (generation * ROUNDS + turn) + number
            for known, new in zip(steps, run(computing(towers, each), COMPUTED_STEPS, place), strict=True):
                known += new
    times = stage_times(chain, towers.stages)
    of_chain, of_graph = (
        simulate_schedule(
            LOOPED, devices=PINNED, micro_batches=towers.micro_batches, stage_times=times, edges=each
        ).makespan
        for each in (edges, towers.edges)
    )
    return compared(min(chain.makespans_s()), min(graph.makespans_s()), float(of_chain / of_graph))


def worker(report: Report) -> None:
    context = start_worker()
    ranks = dist.get_world_size()
    measured: Callable[[Towers, int], dict[str, Value]] = sleeping
    more = ""
    if ranks == PINNED:
        measured, more = pinned, ", computing"
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[context.rank]})
    for number, towers in enumerate(CASES[ranks]):
        cell = f"{towers}{more}"
        if report.missing(cell):
            found = measured(towers, 2 * number)
            if context.rank == 0:
                report.add_cell(cell, found)
    context.close()


def options() -> argparse.ArgumentParser:
    return parser_of_ranks(__doc__, ranks=4)


def main() -> int:
    return run_on_ranks(__file__, options().parse_args(), worker)


if __name__ == "__main__":
    sys.exit(main())
