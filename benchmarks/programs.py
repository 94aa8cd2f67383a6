"""Building, verifying and simulating a large program: 64 devices, 8 loops, 128 micro-batches, one core."""

from __future__ import annotations

import time

import numpy as np
from harness import median_s, print_machine, report

from weft.predict.abstract import simulate_schedule
from weft.predict.costs import Costs
from weft.predict.simulator import simulate
from weft.program.build import build_training_program
from weft.program.layout import PipelineLayout, StageLayout
from weft.program.program import Program
from weft.program.schedules import get_schedule
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


def main() -> None:
    print_machine()
    program = build()
    costs = unit_costs(program)
    print(f"{len(program)} instructions, {len(program.edges)} edges")
    report("build", median_s(build, 3))
    report("verify", median_s(lambda: require_valid(program), 3))
    start = time.perf_counter()
    simulate(program, costs, max_cycles=1)
    report("simulate one cycle, cold (loads the compiler)", time.perf_counter() - start)
    warm = median_s(lambda: simulate(program, costs, max_cycles=1), 3)
    report("simulate one cycle, warm", warm)
    print(f"{len(program) / warm / 1e6:.2f} million instructions per second")
    small = {"devices": 4, "loops": 2, "micro_batches": 8}
    report("weft schedule on 4 devices", median_s(lambda: simulate_schedule("breadth-first", **small)))


if __name__ == "__main__":
    main()
