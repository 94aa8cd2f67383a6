"""Which order hides its reductions behind a slow link? The knee, predicted and measured.

Two network namespaces are two nodes; the link between them is limited by `tc tbf` in both directions. Each
node runs one pipeline of two devices, so that nothing but the reductions of gradients crosses the link. With
v loops a device can hide reductions behind (v - 1) / v of its backward work breadth-first, and of that of P
micro-batches depth-first; with one loop next to nothing (Lamy-Poirier, arXiv 2211.05953). As the link gets
slower, each order has its own knee.

Predictions come from a described cluster whose links have the latency and bandwidth that this script measured
between the ranks. It needs root and ends everything it began.

    python benchmarks/slow_link.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from figures import Value
from harness import Report, parser_of_ranks, words_for_workers
from link import measured_link, words_of
from namespaces import launch, limit_rate
from sleeping import LAYER_KIND, Case, Sleepers, StageSeconds

from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.device import Device
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import predict
from weft.predict.profile import LayerProfile, LayerTiming
from weft.program.kinds import STEP
from weft.run.launch.worker_start import start_worker

DEVICES, REPLICAS = 2, 2
MICRO_BATCHES, LOOPS = 8, 4
# One micro-batch on all stages of a device.
FORWARD_S, BACKWARD_S = 0.080, 0.160
DEVICE_PARAMETERS = 2**19
STEPS, WARM_UP_STEPS = 6, 1
TARGET = 0.10
# Nothing hides the reduction of a device's last stage, one of v, so that even a flat order rises a little: by
# this share of what the others rise at most.
FLATTER = 0.5

CASES = (
    Case("gpipe", 1, MICRO_BATCHES),
    Case("1f1b", 1, MICRO_BATCHES),
    Case("depth-first", LOOPS, MICRO_BATCHES),
    Case("breadth-first", LOOPS, MICRO_BATCHES),
)
WINDOWS_S = {
    "depth-first": (LOOPS - 1) / LOOPS * DEVICES * BACKWARD_S,
    "breadth-first": (LOOPS - 1) / LOOPS * MICRO_BATCHES * BACKWARD_S,
}
# What the reductions of a node take on the link, by its nominal rate.
REDUCTIONS_S = (0.12, 0.24, 0.48, 0.96, 1.44)

LIMIT_S = 560.0


def nominal_rate(reductions_s: float) -> float:
    """Bytes per second at which the all-reduces of a node's devices take that long together."""
    return DEVICES * DEVICE_PARAMETERS * 4 / reductions_s


def described(local: Link, between: Link) -> Cluster:
    """Two nodes of two sleepers."""
    sleeper = Device(name="sleeper", memory_bytes=2**30, memory_bytes_per_s=1e10, synchronous=True)
    node = NodeGroup(name="node", count=REPLICAS, device=sleeper, devices=DEVICES, link=local)
    return Cluster(name="sleepers", groups=(node,), links={("node", "node"): between})


def predicted_s(sleepers: Sleepers, cluster: Cluster) -> float:
    """Seconds of a steady step, from the durations of the sleeps and the links of the cluster."""
    seconds, graph = sleepers.seconds, sleepers.graph
    asleep = LayerTiming(
        device="sleeper",
        layer=LAYER_KIND,
        tp=1,
        micro_batch_size=1,
        forward_s=seconds.forward,
        backward_s=seconds.backward_input + seconds.backward_weight,
        update_s=0.0,
        activation_bytes=4,
    )
    profile = LayerProfile(
        model_fingerprint=graph.fingerprint, sequence=1, precision="fp32", timings=(asleep,), spread=0.0
    )
    return predict(
        CostModel(graph=graph, cluster=cluster, profile=profile), sleepers.plan, sleepers.program
    ).prediction.step_s


def measured_s(sleepers: Sleepers, folder: Path, generation: int) -> float:
    """Median over the steps, from the last optimizer step of all ranks to that of the following step."""
    records = sleepers.run(STEPS, folder, generation, together=False)
    ends = records[sleepers.program.columns.kind[records["position"]] == STEP]
    finish = torch.tensor([int(ends["end_ns"][ends["step"] == step].max()) for step in range(STEPS)])
    dist.all_reduce(finish, op=dist.ReduceOp.MAX)
    return float(statistics.median((finish.diff()[WARM_UP_STEPS - 1 :] * 1e-9).tolist()))


def sleepers_of(case: Case) -> Sleepers:
    half_s = BACKWARD_S / case.loops / 2
    return Sleepers.of(
        case,
        StageSeconds(FORWARD_S / case.loops, half_s, half_s),
        devices=DEVICES,
        replicas=REPLICAS,
        parameters=DEVICE_PARAMETERS // case.loops,
    )


def worker(report: Report) -> None:
    context = start_worker()
    local = measured_link(0, 1)
    if context.rank == 0:
        report.say(f"inside a node: {words_of(local)}")
    for number, reductions_s in enumerate(REDUCTIONS_S):
        left = [case for case in CASES if report.missing(cell_of(case, reductions_s))]
        if not left:
            continue
        if context.local_rank == 0:
            limit_rate(nominal_rate(reductions_s))
        between = measured_link(0, DEVICES)
        # What a device's reductions take when the other device of its node reduces, too.
        moving_s = DEVICES * DEVICE_PARAMETERS * 4 / between.link.bytes_per_s
        if context.rank == 0:
            report.say(f"between the nodes: {words_of(between)}; reductions take {moving_s * 1e3:.0f} ms")
        for case in left:
            sleepers = sleepers_of(case)
            expected_s = predicted_s(sleepers, described(local.link, between.link))
            with tempfile.TemporaryDirectory(prefix="weft-slow-link-") as name:
                found_s = measured_s(sleepers, Path(name), number * len(CASES) + CASES.index(case))
            if context.rank == 0:
                error = expected_s / found_s - 1
                report.add_cell(
                    cell_of(case, reductions_s),
                    {
                        "predicted": Value(expected_s, "s"),
                        "measured": Value(found_s, "s"),
                        "error": Value(error, "share", TARGET, met=abs(error) <= TARGET),
                    },
                )
    if context.rank == 0:
        sum_up(report)
    context.close()


def cell_of(case: Case, reductions_s: float) -> str:
    return f"{case.schedule}, reductions of {reductions_s * 1e3:.0f} ms"


def sum_up(report: Report) -> None:
    """The worst error, how much longer steps get, and whether breadth-first stays flat."""

    def steps(case: Case, what: str) -> list[float]:
        return [report.value(f"{cell_of(case, seconds)}: {what}") for seconds in REDUCTIONS_S]

    worst = max(abs(error) for case in CASES for error in steps(case, "error"))
    report.add("worst error", Value(worst, "share", TARGET))
    spans = [f"{after * 1e3:.0f}" for after in REDUCTIONS_S]
    report.say(f"how much longer a step gets when reductions get longer, {' to '.join(spans)} ms:")
    last = max(i for i, seconds in enumerate(REDUCTIONS_S) if seconds <= WINDOWS_S["breadth-first"])
    rises = {}
    for case in CASES:
        pairs = list(zip(steps(case, "predicted"), steps(case, "measured"), strict=True))
        shares = " ".join(f"{measured:4.0%} ({predicted:4.0%})" for predicted, measured in _growth(pairs))
        window = WINDOWS_S.get(case.schedule, 0.0)
        report.say(f"{case.schedule:<14} can hide {window * 1e3:4.0f} ms: measured (predicted) {shares}")
        rises[case.schedule] = pairs[last][1] / pairs[0][1] - 1
    flat = min(rise for name, rise in rises.items() if name != "breadth-first") * FLATTER
    for name, rise in rises.items():
        what = f"{name}, rise of the step up to reductions of {REDUCTIONS_S[last] * 1e3:.0f} ms"
        report.add(what, Value(rise, "share", target=flat if name == "breadth-first" else None))


def _growth(pairs: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Share of each further second of reductions that no computation hides: (predicted, measured)."""
    for (before, after), (shorter, longer) in zip(pairwise(pairs), pairwise(REDUCTIONS_S), strict=True):
        grown = longer - shorter
        yield (after[0] - before[0]) / grown, (after[1] - before[1]) / grown


def options() -> argparse.ArgumentParser:
    return parser_of_ranks(__doc__)


def main() -> int:
    asked = options().parse_args()
    report = Report("slow_link", asked)
    if asked.worker:
        worker(report)
        return 0
    return launch(
        report,
        [__file__, *words_for_workers(asked)],
        devices=DEVICES,
        bytes_per_s=nominal_rate(REDUCTIONS_S[0]),
        limit_s=LIMIT_S,
    )


if __name__ == "__main__":
    sys.exit(main())
