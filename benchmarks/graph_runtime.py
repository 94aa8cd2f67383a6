"""Does a graph of stages gain what the simulator says? Towers of stages that sleep, executed for real.

Towers run side by side and end in common stages. The same layers are also flattened into a chain, in which
each tower waits for the one before. A step of the graph in GraphPipe's order is compared with a step of the
chain in 1F1B: the gain, and the one that the simulator predicts. Each rank has one stage. The recorder tells
how many micro-batches each stage holds between the begin of a forward and the end of its backward pass.

    python benchmarks/graph_runtime.py            # 4 ranks
    python benchmarks/graph_runtime.py --ranks 8
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
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
from weft.predict.abstract import simulate_schedule
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
GRAPH, CHAIN = "graph-1f1b", "1f1b"


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


CASES = {
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


def measured(towers: Towers, schedule: str, generation: int) -> tuple[float, list[int]]:
    """The median makespan of a step, and the most micro-batches that each rank holds in any step."""
    sleepers = sleepers_of(towers, schedule)
    with tempfile.TemporaryDirectory(prefix="weft-towers-") as folder:
        records = sleepers.run(STEPS, Path(folder), generation, together=True)
    kind = sleepers.program.columns.kind[records["position"]]
    sleeps = is_compute(kind) & (kind != STEP)
    lengths, held = [], torch.zeros(1, dtype=torch.int64)
    for step in range(WARM_UP_STEPS, STEPS):
        mine = sleeps & (records["step"] == step)
        lengths.append(makespan_s(records[mine]))
        held = held.clamp(min=most_held(records[mine], kind[mine]))
    of_all = [torch.zeros_like(held) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, held)
    return statistics.median(lengths), [int(one) for one in of_all]


def most_held(records: np.ndarray, kind: np.ndarray) -> int:
    begins, ends = records["start_ns"][kind == FORWARD], records["end_ns"][kind == BACKWARD]
    times = np.concatenate([begins, ends])
    change = np.concatenate([np.ones(len(begins)), -np.ones(len(ends))])
    return int(np.cumsum(change[np.argsort(times, kind="stable")]).max(initial=0))


def worker(report: Report) -> None:
    context = start_worker()
    ranks = dist.get_world_size()
    for number, towers in enumerate(CASES[ranks]):
        if not report.missing(str(towers)):
            continue
        chain_s, _ = measured(towers, CHAIN, 2 * number)
        graph_s, held = measured(towers, GRAPH, 2 * number + 1)
        if context.rank == 0:
            gain = simulated_s(towers, CHAIN) / simulated_s(towers, GRAPH)
            error = prediction_error(gain, chain_s / graph_s)
            count = towers.stages
            kept = samples_in_flight(towers.edges, (1,) * count, (1,) * count, towers.micro_batches)
            unlike = sum(one != other for one, other in zip(held, kept, strict=True))
            report.add_cell(
                str(towers),
                {
                    "chain": Value(chain_s, "s"),
                    "graph": Value(graph_s, "s"),
                    "gain": Value(chain_s / graph_s, "ratio"),
                    "simulated": Value(gain, "ratio"),
                    "error": Value(error, "share", TARGET, met=abs(error) <= TARGET),
                    "stages with others in flight": Value(unlike, "count", target=0),
                },
            )
    context.close()


def options() -> argparse.ArgumentParser:
    return parser_of_ranks(__doc__, ranks=4)


def main() -> int:
    return run_on_ranks(__file__, options().parse_args(), worker)


if __name__ == "__main__":
    sys.exit(main())
