"""Building, verifying and simulating a large program: 64 devices, 8 loops, 128 micro-batches, one core."""

from __future__ import annotations

import argparse
import time
from functools import partial

import numpy as np
from figures import Value
from harness import Report, parser

from weft.predict.abstract import simulate_schedule
from weft.predict.costs import Costs
from weft.predict.simulator import simulate
from weft.program.build import build_training_program
from weft.program.layout import PipelineLayout, StageLayout
from weft.program.program import Program
from weft.program.rank_program import part_of
from weft.program.schedules import get_schedule
from weft.program.stream_waits import stream_waits
from weft.program.verify import require_valid

DEVICES, LOOPS, MICRO_BATCHES = 64, 8, 128


def build(devices: int = DEVICES, micro_batches: int = MICRO_BATCHES, loops: int = LOOPS) -> Program:
    stages = devices * loops
    layout = PipelineLayout(
        stages=tuple(StageLayout(replicas=((stage % devices,),)) for stage in range(stages)),
        micro_batches=(micro_batches,),
        message_bytes={(stage, stage + 1): 1 for stage in range(stages - 1)},
    )
    return build_training_program(layout, get_schedule("breadth-first"), {})


def unit_costs(program: Program) -> Costs:
    ones = np.ones(len(program), dtype=np.int64)
    zeros = np.zeros(len(program), dtype=np.int64)
    ranks = np.zeros(program.ranks, dtype=np.int64)
    return Costs(
        occupancy=ones,
        latency=zeros,
        tick_s=1e-9,
        synchronous=ranks.astype(bool),
        live_bytes=zeros,
        base_bytes=ranks,
    )


def options() -> argparse.ArgumentParser:
    return parser(__doc__)


def main() -> None:
    report = Report("programs", options().parse_args())
    report.print_machine()
    program = build()
    costs = unit_costs(program)
    report.say(f"{len(program)} instructions, {len(program.edges)} edges")
    report.time("build", build, 3)
    report.time("verify", lambda: require_valid(program), 3)
    if report.missing(cold := "simulate one cycle, cold (loads the compiled engine)"):
        start = time.perf_counter()
        simulate(program, costs, max_cycles=1)
        report.add(cold, Value(time.perf_counter() - start, "s"))
    part = part_of(program, DEVICES // 2)
    report.time("waits between the streams of a rank", lambda: stream_waits(part), 3)
    report.time("simulate one cycle, warm", lambda: simulate(program, costs, max_cycles=1), 3)
    if report.missing(rate := "instructions, one cycle, warm"):
        report.add(rate, Value(len(program) / report.value("simulate one cycle, warm"), "per s"))
    small = partial(simulate_schedule, "breadth-first", devices=4, loops=2, micro_batches=8)
    report.time("weft schedule on 4 devices", small)


if __name__ == "__main__":
    main()
