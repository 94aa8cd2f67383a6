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
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from figures import Value
from harness import Report, parser_of_ranks, words_for_workers
from namespaces import (
    ADDRESSES,
    INTERFACE,
    NamespaceError,
    end_all,
    inside,
    limit_rate,
    reason_to_skip,
    two_namespaces,
)
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

PORT = 29500
LIMIT_S = 560.0
POLL_S = 0.2

PROBE_BYTES, PROBES = 2**20, 5


def nominal_rate(reductions_s: float) -> float:
    """Bytes per second at which the all-reduces of a node's devices take that long together."""
    return DEVICES * DEVICE_PARAMETERS * 4 / reductions_s


@dataclass(frozen=True, slots=True)
class Measured:
    """A link as two ranks found it, and the raw times of empty and of large messages."""

    link: Link
    empty_s: tuple[float, ...]
    large_s: tuple[float, ...]


def measured_link(rank: int, peer: int) -> Measured:
    """Half a round trip of an empty message, and the bandwidth of a large one; every rank gets the answer."""
    empty = [seconds / 2 for seconds in _exchanges_s(rank, peer, 1)]
    latency_s = statistics.median(empty)
    large = [seconds - latency_s for seconds in _exchanges_s(rank, peer, PROBE_BYTES)]
    figures = torch.tensor([*empty, *large], dtype=torch.float64)
    dist.broadcast(figures, rank)
    empty_s, large_s = figures[:PROBES].tolist(), figures[PROBES:].tolist()
    # The large message's own latency is not bandwidth's.
    moving_s = statistics.median(large_s) - statistics.median(empty_s)
    return Measured(Link(PROBE_BYTES / moving_s, statistics.median(empty_s)), tuple(empty_s), tuple(large_s))


def _exchanges_s(rank: int, peer: int, there_bytes: int) -> list[float]:
    """Seconds until each message's empty answer is back, the first left out; the other ranks wait."""
    there, back = torch.zeros(there_bytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    seconds = []
    dist.barrier()
    for _ in range(PROBES + 1):
        began = time.perf_counter()
        if dist.get_rank() == rank:
            dist.send(there, peer)
            dist.recv(back, peer)
        elif dist.get_rank() == peer:
            dist.recv(there, rank)
            dist.send(back, rank)
        seconds.append(time.perf_counter() - began)
    dist.barrier()
    return seconds[1:]


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
    return statistics.median((finish.diff()[WARM_UP_STEPS - 1 :] * 1e-9).tolist())


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
        report.say(f"inside a node: {_words(local)}")
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
            report.say(f"between the nodes: {_words(between)}; reductions take {moving_s * 1e3:.0f} ms")
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


def _words(measured: Measured) -> str:
    def listed(times: tuple[float, ...], unit: float) -> str:
        return " ".join(f"{time * unit:.1f}" for time in times)

    link = measured.link
    return (
        f"{link.bytes_per_s / 1e6:.2f} MB/s, {link.latency_s * 1e6:.0f} us "
        f"(empty messages: {listed(measured.empty_s, 1e6)} us; "
        f"of {PROBE_BYTES / 2**20:g} MiB: {listed(measured.large_s, 1e3)} ms)"
    )


def start_ranks(namespaces: list[int], words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Node by node, device by device, as a cluster counts its ranks."""
    for rank in range(DEVICES * REPLICAS):
        node, device = divmod(rank, DEVICES)
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(DEVICES * REPLICAS),
            "LOCAL_RANK": str(device),
            "LOCAL_WORLD_SIZE": str(DEVICES),
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
            # A namespace has no name server, of which torch would warn.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        command = [*inside(namespaces[node]), sys.executable, __file__, "--worker", *words]
        # Of its own session: Ctrl-C reaches this script, which ends the ranks.
        yield subprocess.Popen(command, env=os.environ | environment, start_new_session=True)


def run_ranks(namespaces: list[int], words: list[str]) -> bool:
    """Whether all ranks ended well within the time limit; none is left when this returns."""
    ranks: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + LIMIT_S
    try:
        ranks.extend(start_ranks(namespaces, words))
        while any(rank.poll() is None for rank in ranks):
            if any(rank.returncode for rank in ranks):
                return False
            if time.monotonic() > deadline:
                print(f"the ranks did not finish within {LIMIT_S:.0f} s", file=sys.stderr)
                return False
            time.sleep(POLL_S)
        return not any(rank.returncode for rank in ranks)
    finally:
        end_all(ranks)


def _stop(signal_number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signal_number)


def options() -> argparse.ArgumentParser:
    return parser_of_ranks(__doc__)


def main() -> int:
    asked = options().parse_args()
    report = Report("slow_link", asked)
    if asked.worker:
        worker(report)
        return 0
    reason = reason_to_skip()
    if reason is not None:
        report.say(f"skipped: {reason}")
        return 0
    report.print_machine()
    signal.signal(signal.SIGTERM, _stop)
    try:
        with two_namespaces(2 * LIMIT_S, nominal_rate(REDUCTIONS_S[0])) as namespaces:
            return 0 if run_ranks(namespaces, words_for_workers(asked)) else 1
    except NamespaceError as error:
        report.say(f"skipped: {error}")
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
