"""A mixture on two expert ranks over links of 1 Gbit/s, 400 Mbit/s and 100 Mbit/s: predicted and measured.

Two network namespaces are two nodes of one rank; `tc tbf` limits the link between them in both directions. A
small mixture trains with `ep = 2` in fp32 on random tokens. An exchange takes rows to their experts, or back,
in a forward or a backward pass. It lasts from the moment both ranks have begun it to the moment both have
ended it. Counts of rows and the loss are sent inside the passes, too, and count with the exchanges.

Predictions take the machine and the layers as `weft measure` does, on both ranks at once. They take the
link's nominal rate, and the latency of its empty messages. Nothing is fitted to the steps. One all-to-all of
the same bytes is timed outside of training, too. It shows what a miss comes from.

    python benchmarks/expert_links.py            # as root, about 2 minutes
    python benchmarks/expert_links.py --quick    # the slowest link and fewer steps
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from figures import Value
from harness import Report
from link import PROBES, measured_link, words_of
from namespaces import limit_rate, main_on_links, parser_on_links
from sync_links import LINKS, QUICK_LINKS, UNLIMITED
from watched_group import GRADIENTS, WatchedGroup, together

from weft.capture.layers import profile_layers
from weft.capture.machine import measure_machine
from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.device import Device
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.plan import Plan
from weft.moves.layout import build_plan, flops_per_layer
from weft.planning.compile import compile_plan
from weft.predict.cost.exchanges import Exchanges, stage_exchanges
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import predict
from weft.predict.profile import LayerProfile, MachineMeasurement
from weft.program.rank_program import part_of
from weft.run.launch.worker_start import start_worker
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stages
from weft.run.stage.stage_module import StageModule
from weft.run.transport.host_group import HostGroup
from weft.training.optimizer.optimizers import OptimizerSettings, optimizer_factory
from weft.training.tasks.base import cross_entropy

RANKS, PRECISION, SEED = 2, "fp32", 7
PRESET, LAYERS, SEQUENCE = "mixtral-1m", 2, 256
# So large that a link's burst of 64 KiB is a small part of every exchange.
MICRO_BATCH_SIZE, MICRO_BATCHES = 16, 2
STEPS, QUICK_STEPS, WARM_UP = 12, 5, 2
ADAMW = OptimizerSettings(name="adamw", learning_rate=1e-4, weight_decay=0.1)
ERROR = 0.10
LIMIT_S = 900.0
BOTH = (0, 1)


class TokenLoss:
    """The mean cross entropy of a micro-batch, of which each rank has its own samples."""

    takes_divided_tokens = True

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs, targets)


@dataclass(frozen=True)
class Trial:
    """What trains, and what was measured of this machine before."""

    config: ModelConfig
    graph: LayerGraph
    plan: Plan
    machine: MachineMeasurement
    profile: LayerProfile

    @classmethod
    def measured(cls) -> Trial:
        """All ranks call it at once, over the unlimited link."""
        config, cluster = mixture(), described(Link(1e9, 1e-4))
        graph, device = layer_graph(config), torch.device("cpu")
        machine = measure_machine(cluster, device, precisions=(PRECISION,))
        name, sizes = cluster.groups[0].device.name, (MICRO_BATCH_SIZE // RANKS,)
        profile = profile_layers(config, graph, name, device, precision=PRECISION, micro_batch_sizes=sizes)
        return cls(config, graph, plan_of(graph), machine, profile)

    def costs(self, between: Link) -> CostModel:
        cluster = described(between)
        return CostModel(graph=self.graph, cluster=cluster, machine=self.machine, profile=self.profile)

    def exchanges(self, costs: CostModel) -> Exchanges:
        """The predicted seconds of a micro-batch's exchanges, and of the sum of gradients."""
        stages = stage_exchanges(self.plan, self.graph, costs.network, [np.array([BOTH])])
        return stages[0].exchanges[0]

    def even_bytes(self) -> int:
        """Bytes that each rank has for one exchange, if all experts have as many rows."""
        rows = self.graph.amounts("dispatched", self.plan.shape(0))
        return round(max(rows) * self.plan.element_bytes)


def mixture() -> ModelConfig:
    return replace(resolve_model(PRESET, sequence=SEQUENCE), layers=LAYERS)


def plan_of(graph: LayerGraph) -> Plan:
    job = Job(
        graph=graph,
        cluster=described(Link(1e9, 1e-4)),
        global_batch=MICRO_BATCHES * MICRO_BATCH_SIZE,
        sequence=SEQUENCE,
        precision=PRECISION,
    )
    layout = Layout(
        pp=1, dp=1, ep=RANKS, loops=1, micro_batch_size=MICRO_BATCH_SIZE, schedule="gpipe", loss="whole"
    )
    return build_plan(job, layout, flops_per_layer(job))


def described(between: Link) -> Cluster:
    """Two nodes of one core, which is measured."""
    core = Device(
        name="core",
        memory_bytes=2**33,
        memory_bytes_per_s=1e10,
        flops_per_s={PRECISION: 1e11},
        synchronous=True,
    )
    node = NodeGroup(name="node", count=RANKS, device=core, devices=1, link=between)
    return Cluster(name="two-nodes", groups=(node,), links={("node", "node"): between})


def train(trial: Trial, steps: int, generation: int) -> dict[str, list[float]]:
    """Seconds of steps, and by step of exchanges and of sums of gradients; all ranks get the same."""
    plan, rank = trial.plan, dist.get_rank()
    stages = build_stages(plan, trial.config, rank, SEED, torch.float32)
    part = part_of(compile_plan(plan, trial.graph), rank)
    runtime = RankRuntime(
        plan,
        part,
        stages,
        TokenLoss(),
        optimizer_factory(ADAMW),
        device="cpu",
        seed=SEED,
        generation=generation,
    )
    group = watch(stages)
    generator = torch.Generator().manual_seed(SEED)
    shape = (MICRO_BATCHES, MICRO_BATCH_SIZE, SEQUENCE + 1)
    tokens = torch.randint(trial.config.vocabulary, shape, generator=generator)
    ends: list[float] = []
    calls: list[int] = []
    for _ in range(WARM_UP + steps):
        result = runtime.step(len(ends), lambda number: (tokens[number, :, :-1], tokens[number, :, 1:]))
        _ = result.loss
        ends.append(time.monotonic())
        calls.append(len(group.calls))
    runtime.close()
    ended = torch.tensor(ends, dtype=torch.float64)
    dist.all_reduce(ended, dist.ReduceOp.MAX)
    found, later = together(group.calls), range(WARM_UP, WARM_UP + steps)
    of_step = [found[calls[step - 1] : calls[step]] for step in later]
    return {
        "step": ended.diff()[WARM_UP - 1 :].tolist(),
        "exchange": [sum(one.seconds for one in step if one.name != GRADIENTS) for step in of_step],
        "gradients": [sum(one.seconds for one in step if one.name == GRADIENTS) for step in of_step],
        "leaving": [sum(one.leaving_bytes for one in step) for step in of_step],
    }


def watch(stages: Mapping[int, object]) -> WatchedGroup:
    """Note the calls of the one stage's expert ranks from now on."""
    (stage,) = stages.values()
    assert isinstance(stage, StageModule)
    group = WatchedGroup(stage.expert.group)
    stage.expert.connect(group.as_group())
    return group


def alone_s(given_bytes: int) -> list[float]:
    """Seconds of repeated all-to-alls of so many bytes from each rank, without any training."""
    given = torch.zeros(given_bytes, dtype=torch.uint8)
    seconds: list[float] = []
    taken, group = torch.empty_like(given), HostGroup(dist.new_group())
    for _ in range(PROBES + 1):
        dist.barrier()
        span = torch.tensor([time.monotonic(), 0.0], dtype=torch.float64)
        group.all_to_all(taken, given)
        span[1] = time.monotonic()
        dist.all_reduce(span, dist.ReduceOp.MAX)
        seconds.append(float(span[1] - span[0]))
    group.close()
    return seconds[1:]


def measure(trial: Trial, between: Link, steps: int, generation: int) -> dict[str, Value]:
    """Train over the link as it is, beside the predictions; all ranks call it."""
    costs, plan = trial.costs(between), trial.plan
    expected_s = predict(costs, plan, compile_plan(plan, trial.graph)).prediction.step_s
    exchanges = trial.exchanges(costs)
    exchange_s = MICRO_BATCHES * (exchanges.forward_s + exchanges.backward_s)
    alone = costs.network.all_to_all(BOTH, trial.even_bytes()).seconds
    found = train(trial, steps, generation)
    sums = zip(found["exchange"], found["gradients"], strict=True)
    rest = [step - sum(one) for step, one in zip(found["step"], sums, strict=True)]
    even = trial.even_bytes() * (RANKS - 1) / RANKS * 4 * LAYERS * MICRO_BATCHES
    pairs = {
        "step": (expected_s, found["step"], ERROR),
        "exchange": (exchange_s, found["exchange"], ERROR),
        "sum of gradients": (exchanges.gradient_s, found["gradients"], None),
        "rest of the step": (expected_s - exchange_s - exchanges.gradient_s, rest, None),
        "one all-to-all alone": (alone, alone_s(trial.even_bytes()), None),
    }
    figures: dict[str, Value] = {}
    for what, (predicted_s, seconds, target) in pairs.items():
        figures |= beside(what, predicted_s, seconds, target)
    ratio = statistics.median(found["leaving"]) / even
    return {**figures, "bytes over those of even loads": Value(ratio, "ratio")}


def beside(
    what: str, predicted_s: float, measured_s: Sequence[float], target: float | None
) -> dict[str, Value]:
    """Predicted and measured seconds, and the error."""
    measured = Value.of_repeats(measured_s, "s")
    error = predicted_s / measured.value - 1
    met = None if target is None else abs(error) <= target
    return {
        f"{what}, predicted": Value(predicted_s, "s"),
        what: measured,
        f"{what}, error": Value(error, "share", target, met=met),
    }


def cell_of(link: str) -> str:
    return f"{PRESET}, {LAYERS} layers, ep {RANKS}; {link}"


def worker(report: Report, asked: argparse.Namespace) -> None:
    context = start_worker()
    torch.set_num_threads(1)
    steps, links = (QUICK_STEPS, QUICK_LINKS) if asked.quick else (STEPS, tuple(LINKS))
    # Without a limit, a link has no nominal rate.
    missing = [link for link in links if link != UNLIMITED and report.missing(cell_of(link))]
    if missing:
        limit_rate(None)
        trial = Trial.measured()
    for number, link in enumerate(missing):
        limit_rate(rate := LINKS[link])
        assert rate is not None
        # The fastest messages, as other work of the machine takes longer than a message.
        found = measured_link(0, 1, min)
        if context.rank == 0:
            report.say(f"{link}: {words_of(found)}")
        figures = measure(trial, Link(rate, found.link.latency_s), steps, number)
        if context.rank == 0:
            report.add_cell(cell_of(link), figures)
    context.close()


def options() -> argparse.ArgumentParser:
    return parser_on_links(__doc__)


def main() -> int:
    return main_on_links("expert_links", __file__, options().parse_args(), worker, LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
