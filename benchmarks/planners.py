"""Searching: AMP's 53 strategies of 16 devices, and every planner on one equal and one mixed cluster."""

from __future__ import annotations

from functools import partial

import numpy as np
from harness import median_s, print_machine, report

from weft.planning.planners import PLANNERS, Planner
from weft.planning.planners.amp import AmpInputs, amp_search, slower_of_both
from weft.planning.problem import Problem, problem_of

DEGREES = (1, 2, 4)
NODES, DEVICES, BATCH = 4, 4, 32
AMP_S = 0.5
REPEATS = 7
# Exhaustive search refuses spaces of this size; the homogeneous planner takes many seconds on mixed clusters.
COMPARED = ("amp", "megatron", "uniform", "metis-form", "annealing", "random")


def inputs(layers: int, *, uneven: bool) -> AmpInputs:
    """Sixteen devices as four nodes of four; layers that are all alike, or none like another."""
    random = np.random.Generator(np.random.Philox(key=layers))
    times = 5e-3 * random.uniform(0.2, 1.8, layers) if uneven else np.full(layers, 5e-3)
    sent = 4e6 * random.uniform(0.2, 1.8, layers) if uneven else np.full(layers, 4e6)
    return AmpInputs(
        devices=(DEVICES,) * NODES,
        bandwidth=slower_of_both(np.full(NODES, 6.25e9), np.full(NODES, 1.25e9)),
        global_batch=BATCH,
        forward_s={degree: tuple((times / degree).tolist()) for degree in DEGREES},
        sent_bytes={degree: tuple(sent.tolist()) for degree in DEGREES},
        gradient_bytes={degree: (5e7 / degree,) * layers for degree in DEGREES},
    )


def amp() -> None:
    for layers in (24, 30, 98):
        for uneven in (False, True):
            given = inputs(layers, uneven=uneven)
            kind = "uneven" if uneven else "equal"
            seconds = median_s(partial(amp_search, given), REPEATS)
            what = f"AMP: {len(amp_search(given))} strategies, {layers} {kind} layers"
            report(what, seconds, AMP_S if layers <= 30 else None)


def search(planner: Planner, problem: Problem) -> None:
    seconds = median_s(partial(planner.search, problem), 3)
    best = planner.search(problem).fitting[0]
    assert best.plan is not None
    assert best.plan.prediction is not None, "a fitting candidate was simulated"
    report(f"{planner.name}, step {best.plan.prediction.step_s * 1e3:.0f} ms", seconds)


def main() -> None:
    print_machine()
    amp()
    for on in ("16xa100-80gb", "8xa100-80gb+8xt4"):
        problem = problem_of(model="gpt2", on=on, global_batch=64, precision="fp16")
        print(f"gpt2 on {on}, global batch 64")
        for name in COMPARED:
            search(PLANNERS[name], problem)


if __name__ == "__main__":
    main()
