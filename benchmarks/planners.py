"""Searching: AMP's 53 strategies of 16 devices, every planner on small clusters, `weft` on large ones."""

from __future__ import annotations

import argparse
import resource
import time
from functools import partial

import numpy as np
from figures import Value
from harness import Report, parser, timed

from weft.planning.planners import PLANNERS, Planner
from weft.planning.planners.amp import AmpInputs, amp_search, slower_of_both
from weft.planning.problem import Problem, problem_of

DEGREES = (1, 2, 4)
NODES, DEVICES, BATCH = 4, 4, 32
AMP_S = 0.5
REPEATS = 7
# Exhaustive search refuses spaces of this size; the homogeneous planner takes many seconds on mixed clusters.
COMPARED = ("weft", "amp", "megatron", "uniform", "metis-form", "annealing", "random")


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


def amp(report: Report) -> None:
    for layers in (24, 30, 98):
        for uneven in (False, True):
            given = inputs(layers, uneven=uneven)
            kind = "uneven" if uneven else "equal"
            what = f"AMP, all strategies of 16 devices, {layers} {kind} layers"
            report.time(what, partial(amp_search, given), REPEATS, AMP_S if layers <= 30 else None)


def search(report: Report, planner: Planner, problem: Problem, what: str) -> None:
    cell = f"{planner.name}, {what}"
    if not report.missing(cell):
        return
    seconds = timed(partial(planner.search, problem), 3)
    best = planner.search(problem).fitting[0]
    assert best.plan is not None
    assert best.prediction is not None, "a fitting candidate was simulated"
    report.add_cell(cell, {"search": seconds, "predicted step": Value(best.prediction.step_s, "s")})


# (what, cluster, model, global batch, most seconds): 1,000 layouts come with any of them.
LARGE = (
    ("64 equal devices", "64xa100-80gb", "llama-13b", 512, None),
    ("256 equal devices", "256xa100-80gb", "llama-13b", 2048, None),
    ("1,024 equal devices", "1024xa100-80gb", "gpt3-175b", 2048, None),
    ("10,000 equal devices", "10000xa100-80gb", "gpt3-175b", 10000, 30.0),
    ("64 mixed devices", "32xa100-80gb+32xv100-32gb", "llama-13b", 512, None),
    ("256 mixed devices", "128xa100-80gb+128xv100-32gb", "llama-13b", 2048, None),
    (
        "1,024 devices of four kinds, 96 blocks",
        "256xa100-80gb+256xv100-32gb+256xh100-80gb+256xa100-40gb",
        "gpt3-175b",
        2048,
        60.0,
    ),
)


def large(report: Report) -> None:
    """Each once, and how many layouts were ranked in how much memory."""
    for what, on, model, batch, most_s in LARGE:
        if not report.missing(what):
            continue
        problem = problem_of(model=model, on=on, global_batch=batch, sequence=2048, precision="fp16")
        began = time.perf_counter()
        layouts = len(PLANNERS["weft"].search(problem).candidates)
        seconds = time.perf_counter() - began
        report.add_cell(
            what,
            {
                "search": Value(seconds, "s", most_s),
                "layouts": Value(layouts, "count"),
                "1,000 layouts": Value(1000.0 * seconds / layouts, "s"),
                "peak memory so far": Value(
                    resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "bytes"
                ),
            },
        )


# (cluster, preset, global batch, most seconds): models whose layers form graphs.
GRAPHS = (
    ("16xa100-40gb", "mmt", 128, 1.0),
    ("16xv100-16gb", "candle-uno", 1024, 1.0),
    ("32xa100-40gb", "mmt", 256, 10.0),
    ("32xv100-16gb", "dlrm", 1024, 10.0),
    ("256xa100-40gb", "mmt", 2048, 60.0),
)


def graphs(report: Report) -> None:
    """The search of `graphpipe`, with the simulations of its finalists."""
    for on, model, batch, most_s in GRAPHS:
        cell = f"graphpipe, {model} on {on}"
        if not report.missing(cell):
            continue
        problem = problem_of(model=model, on=on, global_batch=batch)
        seconds = timed(partial(PLANNERS["graphpipe"].search, problem), 3, most_s)
        fitting = PLANNERS["graphpipe"].search(problem).fitting
        best = Value(fitting[0].step_s, "s")
        report.add_cell(cell, {"search": seconds, "predicted step": best})


def options() -> argparse.ArgumentParser:
    return parser(__doc__)


def main() -> None:
    report = Report("planners", options().parse_args())
    report.print_machine()
    amp(report)
    graphs(report)
    large(report)
    for on in ("16xa100-80gb", "8xa100-80gb+8xt4"):
        problem = problem_of(model="gpt2", on=on, global_batch=64, precision="fp16")
        for name in COMPARED:
            search(report, PLANNERS[name], problem, f"gpt2 on {on}, global batch 64")


if __name__ == "__main__":
    main()
