"""Does the simulator know the orders? Stages that sleep instead of computing, executed for real.

The measured makespan of a step is compared with the simulated one, for every order.

    python benchmarks/sleep_compute.py            # 4 ranks
    python benchmarks/sleep_compute.py --ranks 8
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch.distributed as dist
from figures import Value
from harness import Report, parser_of_ranks, run_on_ranks
from sleeping import Case, Sleepers, StageSeconds, makespan_s

from weft.predict.abstract import simulate_schedule
from weft.program.kinds import STEP, is_compute
from weft.run.launch.worker_start import start_worker
from weft.timeline.figures import prediction_error

# One micro-batch on all stages of a device; no stage sleeps for less than 20 ms.
FORWARD_S, BACKWARD_S = 0.080, 0.160
STEPS, WARM_UP_STEPS = 6, 1
TARGET = 0.03

CASES = (
    Case("gpipe", 1, 8),
    Case("1f1b", 1, 8),
    Case("breadth-first", 2, 8),
    Case("breadth-first", 2, 4),
    Case("breadth-first", 4, 8),
    Case("depth-first", 2, 8),
    Case("depth-first", 4, 8),
    Case("hybrid", 2, 16),
    Case("zb-h1", 1, 8),
    Case("zb-v", 2, 8),
    Case("chimera", 1, 8),
)


def measured_makespan_s(case: Case, ranks: int, folder: Path, generation: int) -> float:
    """Median over the steps, from the first computation of any rank to the last one's end."""
    half_s = BACKWARD_S / case.loops / 2
    seconds = StageSeconds(FORWARD_S / case.loops, half_s, half_s)
    sleepers = Sleepers.of(case, seconds, devices=ranks)
    records = sleepers.run(STEPS, folder, generation, together=True)
    kind = sleepers.program.columns.kind[records["position"]]
    sleeps = records[is_compute(kind) & (kind != STEP)]
    steps = range(WARM_UP_STEPS, STEPS)
    return statistics.median(makespan_s(sleeps[sleeps["step"] == step]) for step in steps)


def worker(report: Report) -> None:
    context = start_worker()
    ranks = dist.get_world_size()
    for generation, case in enumerate(CASES):
        if not report.missing(cell := f"{ranks} ranks, {case}"):
            continue
        figures = simulate_schedule(
            case.schedule,
            devices=ranks,
            loops=case.loops,
            micro_batches=case.micro_batches,
            forward=FORWARD_S,
            backward=BACKWARD_S,
        )
        predicted_s = float(figures.makespan)
        with tempfile.TemporaryDirectory(prefix="weft-sleep-") as name:
            measured_s = measured_makespan_s(case, ranks, Path(name), generation)
        if context.rank == 0:
            error = prediction_error(predicted_s, measured_s)
            report.add_cell(
                cell,
                {
                    "predicted": Value(predicted_s, "s"),
                    "measured": Value(measured_s, "s"),
                    "error": Value(error, "share", TARGET, met=abs(error) <= TARGET),
                },
            )
    if context.rank == 0:
        sum_up(report, ranks)
    context.close()


def sum_up(report: Report, ranks: int) -> None:
    """The worst error, and whether orders rank alike by their time per micro-batch."""
    found = {
        what: np.array([report.value(f"{ranks} ranks, {case}: {what}") for case in CASES])
        for what in ("predicted", "measured", "error")
    }
    report.add(f"{ranks} ranks, worst error", Value(np.abs(found["error"]).max(), "share", TARGET))
    each = np.array([case.micro_batches for case in CASES])
    # Orders that the simulator holds for equal (within its target) may come in any sequence.
    by_prediction = np.argsort(found["predicted"] / each, kind="stable")
    slower = (found["measured"] / each)[by_prediction]
    unlike = sum(a > b * (1 + TARGET) for a, b in itertools.pairwise(slower))
    report.add(f"{ranks} ranks, neighbours in another ranking", Value(unlike, "count", target=0))


def options() -> argparse.ArgumentParser:
    return parser_of_ranks(__doc__, ranks=4)


def main() -> int:
    return run_on_ranks(__file__, options().parse_args(), worker)


if __name__ == "__main__":
    sys.exit(main())
