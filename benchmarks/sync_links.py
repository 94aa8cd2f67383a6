"""Ways for replicas to agree over links of 100 Mbit/s, 400 Mbit/s, 1 Gbit/s and of no limit.

Two network namespaces are two nodes of one rank; `tc tbf` limits the link between them in both directions. A
GPT of 1.1M parameters trains in bf16 on the bytes of Python's standard library, 16 samples of 64 tokens to a
step. Methods that do not meet in every step meet in every eighth, and their figures are of a mean step of a
cycle. Communication lasts from the moment both ranks have begun a collective to the moment both have ended
it. Sent bytes are those of the interface with all headers; the payload, without them, stands beside the
formula of the method. torch's own ways train on the same samples.

Predictions take from measurements: the link, as two ranks find it between two methods; the passes and the
optimizer step of dense training over the unlimited link; the rates of codecs and of memory. Programs, bytes
and what methods compute come from the model of costs. Nothing is fitted to the steps that it predicts.

    python benchmarks/sync_links.py            # as root, about 8 minutes
    python benchmarks/sync_links.py --quick    # two links and fewer steps
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import count, product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from figures import Value
from harness import Report
from link import measured_link, words_of
from linked import (
    ADAMW,
    DENSE_BF16,
    DENSE_FP32,
    FEW_BITS,
    GRAPH,
    LOW_RANK,
    METHODS,
    MODEL,
    PRECISION,
    RANKS,
    SEED,
    WARM_UP,
    Method,
    described,
    plan_of,
    train,
)
from namespaces import limit_rate, main_on_links, parser_on_links
from sync_quality import batches, loss_of, text_bytes
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from weft.capture.machine import KernelClock, codec_seconds, memory_speed
from weft.describe.cluster import Link
from weft.describe.plan import Plan
from weft.describe.synchronisation import DENSE, sync_methods
from weft.planning.compile import compile_plan
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import predict
from weft.predict.profile import LayerProfile, LayerTiming, MachineMeasurement
from weft.program.program import Program
from weft.program.rank_program import part_of
from weft.run.launch.worker_start import start_worker
from weft.run.stage.build import build_stage
from weft.run.stage.stage_module import StageModule

# The unlimited link comes first: it gives the times of computation.
UNLIMITED = "unlimited"
LINKS = {UNLIMITED: None, "1 Gbit/s": 1.25e8, "400 Mbit/s": 5e7, "100 Mbit/s": 1.25e7}
QUICK_LINKS = (UNLIMITED, "100 Mbit/s")
STEPS, QUICK_STEPS = 32, 16
LIMIT_S = 2400.0
# Shares: of predicted steps, of bytes beside their formula where there are enough of them, and of the gain in
# bytes that communication gains.
STEP_ERROR, BYTES_ERROR, BYTES_ENOUGH, GAIN = 0.10, 0.02, 1e6, 0.85
COMPUTE = "computation of dense training"
PEERS = ("DDP", "FSDP2", "DDP, PowerSGD")


@dataclass(frozen=True, slots=True)
class Rates:
    """The rate of memory, and how long codecs take, as this machine has them."""

    memory_bytes_per_s: float
    codecs: MachineMeasurement

    @classmethod
    def measured(cls) -> Rates:
        clock, budget_s = KernelClock(torch.device("cpu"), 0.0), 0.08
        codecs = (codec_seconds(values, clock, budget_s) for values in (2**12, 2**16, 2**20))
        encode, decode = zip(*codecs, strict=True)
        others: dict[str, Any] = {"matmul": {}, "memory": (), "message": (), "collectives": {}}
        others |= {"launch_s": 0.0, "instruction_s": 0.0, "spread": 0.0}
        others |= {"compute_slowdown": 1.0, "communication_slowdown": 1.0}
        codes = MachineMeasurement(device="core", encode=encode, decode=decode, **others)
        return cls(memory_speed(2**24, clock, budget_s)[1], codes)

    def predicted_s(self, plan: Plan, program: Program, between: Link, compute: Mapping[str, float]) -> float:
        """Seconds of a mean step; all layers have equal parts of the measured `compute`."""
        each = 1 / len(GRAPH.layers)
        timings = tuple(
            LayerTiming(
                device="core",
                layer=kind,
                tp=1,
                micro_batch_size=plan.micro_batch_size,
                forward_s=compute["forward"] * each,
                backward_s=compute["backward"] * each,
                # It was measured where each rank steps its share.
                update_s=RANKS * compute["update"] * each,
                activation_bytes=0,
            )
            for kind in dict.fromkeys(layer.kind for layer in GRAPH.layers)
        )
        profile = LayerProfile(
            model_fingerprint=GRAPH.fingerprint,
            sequence=MODEL.sequence,
            precision=PRECISION,
            timings=timings,
            spread=0.0,
        )
        cluster = described(self.memory_bytes_per_s, between)
        model = CostModel(graph=GRAPH, cluster=cluster, machine=self.codecs, profile=profile)
        return predict(model, plan, program).prediction.step_s


@dataclass(frozen=True)
class Run:
    """The measured steps of each cell, and numbers for the runtimes of this process."""

    steps: int
    generations: Iterator[int] = field(default_factory=count)


def measure(report: Report, method: Method, link: str, between: Link, rates: Rates, run: Run) -> None:
    """Train with a method over the link as it is, and predict the step."""
    plan = plan_of(method)
    program = compile_plan(plan, GRAPH)
    rank = dist.get_rank()
    trained = train(method, plan, part_of(program, rank), run.steps, next(run.generations))
    found = trained.figures(method)
    if rank != 0:
        return
    if method == DENSE_FP32 and link == UNLIMITED:
        report.add_cell(COMPUTE, {what: Value(seconds, "s") for what, seconds in trained.compute().items()})
    expected_s = rates.predicted_s(plan, program, between, report.values(COMPUTE))
    error = expected_s / found["step"] - 1
    formula = method.formula_bytes(torch_stage())
    beside = Value(trained.sent.payload_bytes / run.steps / formula, "ratio")
    if trained.sent.bytes > BYTES_ENOUGH:
        beside = replace(beside, target=1 + BYTES_ERROR, met=abs(beside.value - 1) <= BYTES_ERROR)
    report.add_cell(
        cell_of(method.name, link),
        {
            "step": Value(found["step"], "s"),
            "predicted": Value(expected_s, "s"),
            "error": Value(error, "share", STEP_ERROR, met=abs(error) <= STEP_ERROR),
            "communication": Value(found["communication"], "s"),
            "sent": Value(trained.sent.bytes / run.steps, "bytes"),
            "formula": Value(formula, "bytes"),
            "payload / formula": beside,
            "weights": Value(trained.digest, "count"),
        },
    )


def cell_of(name: str, link: str) -> str:
    return f"{name}; {link}"


def torch_stage() -> StageModule:
    """The whole model, in fp32."""
    stage = build_stage(MODEL, range(len(GRAPH.layers)), SEED, torch.float32)
    assert isinstance(stage, StageModule), "the model is weft's"
    return stage


def peer_model(name: str) -> nn.Module:
    """The model as torch trains it on several ranks, with products in bf16 and gradients in fp32."""
    stage = torch_stage()
    if name == "FSDP2":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*stage.blocks, stage):
            fully_shard(module, mp_policy=policy)
        return stage
    # With one bucket: several buckets' sums overtake each other in the hook's threads, and then ranks differ.
    model = DistributedDataParallel(stage, bucket_cap_mb=64 if name == "DDP, PowerSGD" else None)
    if name == "DDP, PowerSGD":
        state = PowerSGDState(None, matrix_approximation_rank=LOW_RANK, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook)
    return model


def peer_step_s(name: str, steps: int) -> float:
    """Median seconds of torch's steps on the same samples."""
    model, data, rank, plan = peer_model(name), text_bytes(), dist.get_rank(), plan_of(DENSE_FP32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=ADAMW.learning_rate, weight_decay=ADAMW.weight_decay)
    ends = []
    for step in range(WARM_UP + steps):
        inputs, targets = batches(data, plan, "links", step)(rank)
        with nullcontext() if name == "FSDP2" else torch.autocast("cpu", torch.bfloat16):
            logits = model(inputs)
        loss_of(logits.float(), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    return statistics.median(np.diff(ends[WARM_UP - 1 :]))


def worker(report: Report, asked: argparse.Namespace) -> None:
    context = start_worker()
    torch.set_num_threads(1)
    rates, run = Rates.measured(), Run(QUICK_STEPS if asked.quick else STEPS)
    methods, links = installed(), QUICK_LINKS if asked.quick else tuple(LINKS)
    for link in links:
        limit_rate(LINKS[link])
        for method in methods:
            if report.missing(cell_of(method.name, link)):
                measure(report, method, link, found_link(report, link), rates, run)
        for name in PEERS:
            if report.missing(cell_of(name, link)):
                step_s = peer_step_s(name, run.steps)
                if context.rank == 0:
                    report.add_cell(cell_of(name, link), {"step": Value(step_s, "s")})
    if context.rank == 0:
        for method in METHODS:
            if method not in methods:
                report.say(f"{method.name}: left out, no installed method has this name")
        sum_up(report, methods, links)
    context.close()


def installed() -> Sequence[Method]:
    known = {DENSE, *sync_methods()}
    return [method for method in METHODS if method.sync in known]


def found_link(report: Report, link: str) -> Link:
    # The fastest messages: without a limit, other work of the machine takes longer than a message.
    found = measured_link(0, 1, min)
    if dist.get_rank() == 0:
        report.say(f"{link}: {words_of(found)}")
    return found.link


def sum_up(report: Report, methods: Sequence[Method], links: Sequence[str]) -> None:
    """What each method gains over dense training, and whether weights are the same over all links."""
    for baseline, method, link in product((DENSE_FP32, DENSE_BF16), methods, links):
        if method in (DENSE_FP32, baseline):
            continue
        dense, other = (report.values(cell_of(one.name, link)) for one in (baseline, method))
        sent, talked, step = (dense[what] / other[what] for what in ("sent", "communication", "step"))
        gained = Value(talked, "ratio")
        if method == FEW_BITS:
            gained = Value(talked, "ratio", GAIN * sent, met=talked >= GAIN * sent)
        ratios = {"sent": Value(sent, "ratio"), "communication": gained, "step": Value(step, "ratio")}
        report.add_cell(f"{baseline.name} over {cell_of(method.name, link)}", ratios)
    differ = [
        method
        for method in methods
        if len({report.value(f"{cell_of(method.name, link)}: weights") for link in links}) > 1
    ]
    report.add_outcome("final weights, the same over all links", len(methods), len(differ))


def options() -> argparse.ArgumentParser:
    return parser_on_links(__doc__)


def main() -> int:
    return main_on_links("sync_links", __file__, options().parse_args(), worker, LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
