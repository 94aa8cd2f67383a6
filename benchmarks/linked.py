"""What `sync_links.py` trains over its links: the model, the methods, their plans, and runs of them."""

from __future__ import annotations

import hashlib
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from namespaces import Sent
from sync_quality import MODEL as QUALITY_MODEL
from sync_quality import RANKS as RANKS
from sync_quality import batches, loss_of, replicated_plan, text_bytes
from torch import nn

from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.device import Device
from weft.describe.families import layer_graph
from weft.describe.plan import Choice, Plan, Sharding
from weft.describe.synchronisation import DENSE
from weft.methods.clan.options import FP32_BYTES, ClanOptions
from weft.program.kinds import BACKWARD, FORWARD, STEP, is_collective
from weft.program.rank_program import RankProgram
from weft.run.record.recorder import Recorder
from weft.run.record.slots import read_slots
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stages
from weft.training.optimizer.optimizers import OptimizerSettings, optimizer_factory

SEED, EVERY, LOW_RANK = 7, 8, 4
# Of a sign and its part of a scale, there and back.
SIGN_BITS = 2 * (1 + 32 / ClanOptions().block)
MODEL = replace(QUALITY_MODEL, name="gpt-links", layers=5, hidden=128, feed_forward=512)
GRAPH = layer_graph(MODEL)
PRECISION = "bf16"
ADAMW = OptimizerSettings(name="adamw", learning_rate=1e-3, weight_decay=0.1)
WARM_UP = EVERY


def all_elements(stage: nn.Module) -> int:
    return sum(parameter.numel() for parameter in stage.parameters())


def factored_elements(stage: nn.Module) -> int:
    """Of the two factors of each matrix that they make at least half as small, and of all else."""
    found = 0
    for parameter in stage.parameters():
        rows, columns = len(parameter), parameter.numel() // len(parameter)
        factors = min(LOW_RANK, rows, columns) * (rows + columns)
        found += factors if 2 * factors <= parameter.numel() else parameter.numel()
    return found


def signed_elements(stage: nn.Module) -> float:
    """Of all, where small parameters count by the bits that they take whole."""
    least = ClanOptions().minimum_bytes // FP32_BYTES
    sizes = [parameter.numel() for parameter in stage.parameters()]
    return sum(size if size >= least else size * 64 / SIGN_BITS for size in sizes)


@dataclass(frozen=True)
class Method:
    """A way to agree; a cycle of `steps` sends `bits` for each of its elements, there and back together."""

    name: str
    bits: float
    sync: str = DENSE
    options: Mapping[str, Any] = field(default_factory=dict)
    sharding: Sharding = "zero-0"
    reduce_precision: str | None = None
    steps: int = 1
    elements: Callable[[nn.Module], float] = all_elements

    def formula_bytes(self, stage: nn.Module) -> float:
        """Bytes that one rank sends in a mean step."""
        return self.bits / 8 * self.elements(stage) * (RANKS - 1) / RANKS / self.steps


def rare(name: str, bits: float = 64) -> Method:
    return Method(name, bits, name, {"every": EVERY}, steps=EVERY)


DENSE_FP32 = Method("dense, fp32 gradients", 32 + 16, sharding="zero-1")
DENSE_BF16 = Method("dense, bf16 gradients", 16 + 16, sharding="zero-1", reduce_precision="bf16")
FEW_BITS = Method("sdp4bit", 4 + 32 / 128 + 4 + 32 / 2048, "sdp4bit", sharding="zero-1")
METHODS = (
    DENSE_FP32,
    DENSE_BF16,
    FEW_BITS,
    Method("power-sgd", 64, "power-sgd", {"rank": LOW_RANK}, elements=factored_elements),
    Method("clan", SIGN_BITS, "clan", {"codec": "scaled-sign"}, elements=signed_elements),
    rare("local-averaging"),
    rare("slow-momentum"),
    rare("diloco"),
    rare("sign-momentum", 32 + 2),
    Method("cser", 64 * EVERY / 32, "cser", {"ratio": 32.0, "every": EVERY}, steps=EVERY),
)


def plan_of(method: Method) -> Plan:
    sync, cluster = Choice(name=method.sync, options=method.options), described(1e10, Link(1e8, 1e-4))
    return replicated_plan(GRAPH, cluster, sync, method.sharding, PRECISION, method.reduce_precision)


def described(memory_bytes_per_s: float, between: Link) -> Cluster:
    """Two nodes of one core; nothing here uses its flops, or the link inside a node."""
    core = Device(
        name="core",
        memory_bytes=2**33,
        memory_bytes_per_s=memory_bytes_per_s,
        flops_per_s={PRECISION: 1e11},
        synchronous=True,
    )
    node = NodeGroup(name="node", count=RANKS, device=core, devices=1, link=between)
    return Cluster(name="two-nodes", groups=(node,), links={("node", "node"): between})


@dataclass(frozen=True, slots=True)
class Trained:
    """A run of one rank: its records, what it sent in the measured steps, and a digest of its weights."""

    part: RankProgram
    records: npt.NDArray[np.void]
    sent: Sent
    digest: int

    def figures(self, method: Method) -> dict[str, float]:
        """Seconds of a mean step and of its communication, the median of cycles; all ranks call it."""
        rows = np.sort(self.records, order=["step", "position"])
        spans = torch.from_numpy(np.stack([rows["start_ns"], rows["end_ns"]]))
        dist.all_reduce(spans, dist.ReduceOp.MAX)
        start, end = spans.numpy() * 1e-9
        collective = is_collective(self.part.columns.kind[rows["position"] - self.part.first_row])
        cycle = rows["step"] // method.steps
        cycles = np.arange(WARM_UP // method.steps - 1, cycle.max() + 1)
        ends = [end[cycle == one].max() for one in cycles]
        talking = [(end - start)[collective & (cycle == one)].sum() for one in cycles[1:]]
        return {
            "step": statistics.median(np.diff(ends)) / method.steps,
            "communication": statistics.median(talking) / method.steps,
        }

    def compute(self) -> dict[str, float]:
        """Median seconds of this rank's passes and optimizer steps."""
        kinds = self.part.columns.kind[self.records["position"] - self.part.first_row]
        kept = self.records["step"] >= WARM_UP
        seconds = (self.records["end_ns"] - self.records["start_ns"]) * 1e-9
        names = {"forward": FORWARD, "backward": BACKWARD, "update": STEP}
        return {name: float(np.median(seconds[kept & (kinds == kind)])) for name, kind in names.items()}


def train(method: Method, plan: Plan, part: RankProgram, measured: int, generation: int) -> Trained:
    with tempfile.TemporaryDirectory(prefix="weft-links-") as folder:
        every = WARM_UP + measured
        recorder = Recorder(Path(folder), program=part, plan_id=plan.plan_id, steps=every)
        runtime = RankRuntime(
            plan,
            part,
            build_stages(plan, MODEL, part.rank, SEED, torch.float32),
            loss_of,
            optimizer_factory(ADAMW),
            device="cpu",
            seed=SEED,
            recorder=recorder,
            generation=generation,
        )
        data = text_bytes()

        def sent_in(steps: range) -> Sent:
            before = Sent.now()
            for step in steps:
                runtime.step(step, batches(data, plan, "links", step))
            # It waits for all streams. The model has no statistics.
            runtime.average_statistics()
            dist.barrier()
            return Sent.now().since(before)

        sent_in(range(WARM_UP))
        sent = sent_in(range(WARM_UP, every))
        runtime.gather_weights()
        digest = digest_of(runtime.stages.values())
        runtime.close()
        recorder.close()
        return Trained(part, read_slots(recorder.path).records, sent, digest)


def digest_of(stages: Iterable[nn.Module]) -> int:
    """48 bits of all weights, which a figure holds exactly."""
    found = hashlib.blake2b(digest_size=6)
    for stage in stages:
        for parameter in stage.parameters():
            found.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(found.digest(), "little")
