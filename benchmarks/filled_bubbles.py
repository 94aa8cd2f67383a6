"""Does work in bubbles leave the step as it is? K-FAC, done for real, between passes that sleep.

The stages sleep instead of computing; the work computes and then sleeps until its planned end. Steps with the
work are compared with steps without it, and the busy share of ranks with the predicted one.

    python benchmarks/filled_bubbles.py            # 4 ranks
    python benchmarks/filled_bubbles.py --ranks 8
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from figures import Value
from harness import Report, parser_of_ranks, run_on_ranks
from sleeping import Case, Deadline, Sleepers, Sleeping, StageSeconds
from torch import nn

from weft.describe.families.own import CalledLinear
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Choice, Plan
from weft.methods.bubble_filling.decide import decide
from weft.methods.bubble_filling.options import options_of, read_windows
from weft.methods.kfac.runtime.stage_curvature import LayerCurvature
from weft.planning.compile import compile_plan
from weft.predict.costs import Costs
from weft.predict.simulator import Simulation, simulate
from weft.program.kinds import KINDS, is_compute
from weft.program.program import Program
from weft.run.launch.worker_start import start_worker
from weft.run.stage.families.own import OwnStage

# Of one micro-batch on all stages of a device, of one curvature, and of one inverse.
FORWARD_S, BACKWARD_S, CURVATURE_S, INVERSE_S = 0.080, 0.160, 0.012, 0.090
WIDTH = 128
CYCLES, WARM_UP_CYCLES = 3, 1
STEP_TARGET, BUSY_TARGET = 0.02, 0.02

CASES = (
    Case("gpipe", 1, 8),
    Case("1f1b", 1, 8),
    Case("breadth-first", 2, 8),
    Case("depth-first", 2, 8),
    Case("chimera", 1, 8),
    Case("zb-h1", 1, 8),
)


class WorkingStage(OwnStage):
    """A linear layer, and a sleep; what its inverses need is small beside the sleep."""

    def __init__(self, index: int, deadline: Deadline, seconds: StageSeconds) -> None:
        nn.Module.__init__(self)
        self.linears = {index: [CalledLinear("", 0, WIDTH, WIDTH, 1)]}
        self.layers = nn.ModuleDict({str(index): nn.Linear(WIDTH, WIDTH)})
        self.scale = nn.Parameter(torch.ones(1))
        self._deadline, self._seconds = deadline, seconds

    def input_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        return (micro_batch_size, WIDTH)

    output_shape = input_shape

    def layer_functions(self, inputs: torch.Tensor) -> list[Callable[..., torch.Tensor]]:
        return [self._slept]

    def _slept(self, values: torch.Tensor) -> torch.Tensor:
        seconds, layer = self._seconds, next(iter(self.layers.values()))
        scale = Sleeping.apply(self.scale, self._deadline, 0.0, seconds.backward_weight)
        scaled = layer(values) * scale
        slept: torch.Tensor = Sleeping.apply(scaled, self._deadline, seconds.forward, seconds.backward_input)
        return slept


class Steps(NamedTuple):
    """The median seconds of a step, and the mean busy share of all ranks in it."""

    step_s: float
    busy: float


def seconds_of(case: Case) -> StageSeconds:
    half_s = BACKWARD_S / case.loops / 2
    return StageSeconds(FORWARD_S / case.loops, half_s, half_s)


def asked(case: Case, stages: int) -> tuple[Choice, ...]:
    linears = f"0-{stages - 1}: {WIDTH}>{WIDTH}"
    return (
        Choice(name="kfac", options={"damping": 1.0, "every": 1, "linears": linears}),
        Choice(name="bubble-filling", options={"work": "kfac"}),
    )


def prices(case: Case) -> Callable[[Program], Costs]:
    """Return the costs of a program: passes and work take their sleeps, and nothing else takes time."""
    own = seconds_of(case)
    by_kind = {
        "forward": own.forward,
        "backward": own.backward_input + own.backward_weight,
        "backward_input": own.backward_input,
        "backward_weight": own.backward_weight,
        **dict.fromkeys(("input_curvature", "output_curvature"), CURVATURE_S / case.loops),
        **dict.fromkeys(("invert_input_curvature", "invert_output_curvature"), INVERSE_S / case.loops),
    }
    ticks = np.array([round(by_kind.get(one.name, 0.0) * 1e9) for one in KINDS], dtype=np.int64)

    def price(program: Program) -> Costs:
        rows, ranks = len(program), program.ranks
        return Costs(
            occupancy=ticks[program.columns.kind],
            latency=np.zeros(rows, dtype=np.int64),
            tick_s=1e-9,
            synchronous=np.ones(ranks, dtype=np.bool_),
            live_bytes=np.zeros(rows, dtype=np.int64),
            base_bytes=np.zeros(ranks, dtype=np.int64),
        )

    return price


def filled(case: Case, plan: Plan, graph: LayerGraph) -> tuple[Plan, Steps]:
    """Return the plan with K-FAC in its bubbles, and its predicted step."""
    price = prices(case)

    def predicted(one: Plan) -> tuple[Program, Simulation]:
        program = compile_plan(one, graph)
        return program, simulate(program, price(program))

    found = decide(plan, graph, predicted)
    program, simulation = predicted(found)
    taken = simulation.timeline.end_ns - simulation.timeline.start_ns
    busy_s = taken[is_compute(simulation.timeline.kind)].sum() / 1e9
    share = busy_s / (simulation.step_s * program.steps_per_cycle * program.ranks)
    return found, Steps(simulation.step_s, float(share))


@contextmanager
def padded(case: Case, deadline: Deadline) -> Iterator[None]:
    """Let each piece of work end when it should: what it computes is a part of its sleep."""

    def longer(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            done = function(*given)
            deadline.sleep(seconds)
            return done

        return run

    add = longer(LayerCurvature.add, CURVATURE_S / case.loops)
    invert = longer(LayerCurvature.invert, INVERSE_S / case.loops)
    with patch.object(LayerCurvature, "add", add), patch.object(LayerCurvature, "invert", invert):
        yield


def measured(case: Case, sleepers: Sleepers, steps: int, folder: Path, generation: int) -> Steps:
    """Return the steps of all ranks: from the first start in one to the first start in the next."""
    records = sleepers.run(steps, folder, generation, together=False)
    kind = sleepers.program.columns.kind[records["position"]]
    own = records[is_compute(kind)]
    starts = torch.tensor([int(own["start_ns"][own["step"] == step].min()) for step in range(steps)])
    dist.all_reduce(starts, op=dist.ReduceOp.MIN)
    first = WARM_UP_CYCLES * sleepers.program.steps_per_cycle
    whole = float(starts[-1] - starts[first]) * 1e-9
    inside = (own["step"] >= first) & (own["step"] < steps - 1)
    busy = torch.tensor([float((own["end_ns"] - own["start_ns"])[inside].sum()) * 1e-9])
    dist.all_reduce(busy)
    lengths = (starts[first + 1 :] - starts[first:-1]).double() * 1e-9
    return Steps(statistics.median(lengths.tolist()), float(busy) / whole / dist.get_world_size())


def run_case(case: Case, ranks: int, folder: Path, generation: int) -> tuple[Steps, Steps, Steps, int]:
    """Return the steps without work, measured; with it predicted, and measured; and the longest window."""
    seconds, deadline = seconds_of(case), Deadline()
    plain = Sleepers.of(case, seconds, devices=ranks)
    plain = replace(plain, features=WIDTH, make_stage=lambda index, own: WorkingStage(index, own, seconds))
    plan = plain.plan.model_copy(update={"methods": asked(case, len(plain.plan.stages))})
    plan, predicted = filled(case, plan, plain.graph)
    options = options_of(plan)
    assert options is not None, "the plan fills its bubbles"
    steps = max(one.steps for one in read_windows(options.windows))
    working = replace(
        plain,
        plan=plan,
        program=compile_plan(plan, plain.graph),
        make_stage=lambda index, own: WorkingStage(index, deadline, seconds),
    )
    count = (WARM_UP_CYCLES + CYCLES) * working.program.steps_per_cycle + 1
    before = measured(case, plain, count, folder / "plain", 2 * generation)
    with padded(case, deadline):
        after = measured(case, working, count, folder / "filled", 2 * generation + 1)
    return before, predicted, after, steps


def worker(report: Report) -> None:
    context = start_worker()
    ranks = dist.get_world_size()
    torch.set_num_threads(1)
    for generation, case in enumerate(CASES):
        if not report.missing(cell := f"{ranks} ranks, {case}"):
            continue
        with tempfile.TemporaryDirectory(prefix="weft-bubbles-") as name:
            for part in ("plain", "filled"):
                (Path(name) / part).mkdir()
            before, predicted, after, steps = run_case(case, ranks, Path(name), generation)
        if context.rank == 0:
            longer, off = after.step_s / before.step_s - 1.0, after.busy - predicted.busy
            report.add_cell(
                cell,
                {
                    "steps of a window": Value(steps, "count"),
                    "step without the work": Value(before.step_s, "s"),
                    "step with it": Value(after.step_s, "s"),
                    "longer by": Value(longer, "share", STEP_TARGET, met=longer <= STEP_TARGET),
                    "busy without the work": Value(before.busy, "share"),
                    "busy with it, predicted": Value(predicted.busy, "share"),
                    "busy with it": Value(after.busy, "share", BUSY_TARGET, met=abs(off) <= BUSY_TARGET),
                },
            )
    context.close()


def options() -> argparse.ArgumentParser:
    return parser_of_ranks(__doc__, ranks=4)


def main() -> int:
    return run_on_ranks(__file__, options().parse_args(), worker)


if __name__ == "__main__":
    sys.exit(main())
