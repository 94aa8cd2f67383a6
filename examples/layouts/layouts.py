"""The layouts of a model on A100 with each one's step and memory, as weft's data sheets predict them.

What is swept is what Hagemann et al. (arXiv 2311.05610) swept: tensor and pipeline ranks, micro-batch sizes,
recomputation, kernels of attention and norms, and whether tensor ranks divide the tokens between their
products (sequence parallelism). Nothing is measured, and no rule decides anything here.

Of each of the twelve NVLinks of an A100, 25 GB/s by the data sheet, kernels get 20 GB/s: headers take the
rest (NVIDIA's maintainer in nccl-tests issue 149, and `SM80_NVLINK_BW` in NCCL). Between nodes it is the data
sheet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.kernels import Accumulation, Attention, Kernels, Norm, with_kernels
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.plan import Plan, Recompute
from weft.moves.layout import build_plan, flops_per_layer, refuse
from weft.planning.cluster_changes import changed_cluster
from weft.planning.long_steps import predict_long
from weft.predict.cost.placed_plan import CostModel
from weft.predict.engine import load_compiled_engine

VOCABULARY = 128_000
TOKENS = 2**22
DEVICE = "a100-80gb"
PEAK_FLOPS = 312e12
NVLINK = "intra 240 GB/s"
DEGREES = (1, 2, 4, 8)
KERNELS: tuple[tuple[Attention, Norm], ...] = (
    ("math", "unfused"),
    ("fused", "unfused"),
    ("flash1", "unfused"),
    ("flash2", "unfused"),
    ("flash2", "fused"),
)
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Case:
    """A model on so many devices, with samples of `sequence` tokens and `TOKENS` tokens in a step."""

    model: str
    sequence: int
    devices: int

    @property
    def global_batch(self) -> int:
        return TOKENS // self.sequence

    @property
    def config(self) -> ModelConfig:
        return replace(resolve_model(self.model, sequence=self.sequence), vocabulary=VOCABULARY)

    @property
    def parameters(self) -> int:
        """Of all matrices, both embeddings included."""
        one = self.config
        block = 4 * one.hidden**2 + 3 * one.hidden * one.feed_forward
        return one.layers * block + 2 * one.vocabulary * one.hidden

    @property
    def flops_per_token(self) -> float:
        """Of forward and backward, as the paper counts: six for each parameter, and the whole square of
        attention."""
        return 6.0 * self.parameters + 12.0 * self.config.layers * self.config.hidden * self.sequence

    def __str__(self) -> str:
        return f"{self.model}, {self.sequence // 1024}k tokens, {self.devices} devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One point of the sweep."""

    tp: int
    pp: int
    micro_batch_size: int = 1
    recompute: Recompute = "none"
    attention: Attention = "flash2"
    norm: Norm = "fused"
    sequence_parallel: bool = True

    @property
    def ways(self) -> int:
        """Into how many parts the model is divided."""
        return self.tp * self.pp

    def __str__(self) -> str:
        text = f"tp {self.tp} x pp {self.pp}, micro-batch size "
        text += f"{self.micro_batch_size}, recompute {self.recompute}, {self.attention}, {self.norm} norm"
        return text + (", tokens divided" if self.sequence_parallel and self.tp > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A choice, the seconds of its step, what its fullest device holds, and whether that fits.

    `mfu` is the share of the peak that the operations of `Case.flops_per_token` take.
    """

    choice: Choice
    step_s: float
    peak_bytes: int
    fits: bool
    mfu: float


def choices(
    *,
    degrees: Sequence[int] = DEGREES,
    stages: Sequence[int] = (*DEGREES, 16),
    sizes: Sequence[int] = (1, 2, 4),
    kernels: Sequence[tuple[Attention, Norm]] = KERNELS,
    tokens_divided: Sequence[bool] = (False, True),
) -> Iterator[Choice]:
    """All combinations that differ; the tokens of one tensor rank cannot be divided.

    With the last of the kernels all ways to recompute. With others nothing, but stored scores are made again,
    too, for they rarely fit.
    """
    for tensor, pipeline, size, (attention, norm) in product(degrees, stages, sizes, kernels):
        ways = RECOMPUTE[:1] if attention.startswith("flash") else RECOMPUTE[:2]
        for again in RECOMPUTE if (attention, norm) == KERNELS[-1] else ways:
            for divided in tokens_divided if tensor > 1 else (False,):
                yield Choice(
                    tp=tensor,
                    pp=pipeline,
                    micro_batch_size=size,
                    recompute=again,
                    attention=attention,
                    norm=norm,
                    sequence_parallel=divided,
                )


def sweep(case: Case, chosen: Iterable[Choice], accumulation: Accumulation = "fused") -> list[Predicted]:
    """Predict every choice that the devices, the batch and the model's heads allow.

    `accumulation` says how the program adds up the gradients of micro-batches; see `weft.describe.kernels`.
    """
    cluster = changed_cluster(parse_cluster(f"{case.devices}x{DEVICE}"), NVLINK)
    config = case.config
    own = layer_graph(config)
    load_compiled_engine()
    weights = flops_per_layer(Job(graph=own, cluster=cluster, global_batch=1, sequence=case.sequence))
    graphs: dict[Kernels, LayerGraph] = {}
    found = []
    for choice in chosen:
        kernels = Kernels(
            attention=choice.attention,
            norm=choice.norm,
            sequence_parallel=choice.sequence_parallel,
            accumulation=accumulation,
        )
        if kernels not in graphs:
            graphs[kernels] = _graph(own, config, kernels)
        job = Job(
            graph=graphs[kernels],
            cluster=cluster,
            global_batch=case.global_batch,
            sequence=case.sequence,
            precision="bf16",
        )
        plan = _plan(job, choice, weights)
        if plan is None:
            continue
        step = predict_long(CostModel(graph=job.graph, cluster=cluster), plan).prediction
        room = cluster.device_of(0).usable_bytes
        work = case.flops_per_token * TOKENS / (case.devices * PEAK_FLOPS)
        peak = max(step.peak_bytes)
        found.append(
            Predicted(
                choice=choice, step_s=step.step_s, peak_bytes=peak, fits=peak <= room, mfu=work / step.step_s
            )
        )
    return found


def _graph(own: LayerGraph, config: ModelConfig, kernels: Kernels) -> LayerGraph:
    """With attention that stores no scores, norms and activations are what can be made again in part."""
    graph = with_kernels(own, config, kernels)
    if not kernels.attention.startswith("flash"):
        return graph
    layers = tuple(
        replace(layer, products=plain.products, product_bytes=plain.product_bytes, again=None)
        for layer, plain in zip(graph.layers, own.layers, strict=True)
    )
    return replace(graph, layers=layers)


def _plan(job: Job, choice: Choice, weights: Sequence[float]) -> Plan | None:
    """1F1B, stages of nearly equal weight, states shared out over replicas, gradients reduced at the end."""
    replicas, rest = divmod(job.cluster.ranks, choice.ways)
    if rest or not replicas:
        return None
    layout = Layout(
        pp=choice.pp,
        dp=replicas,
        tp=choice.tp,
        loops=1,
        micro_batch_size=choice.micro_batch_size,
        schedule="1f1b",
        sharding="zero-1" if replicas > 1 else "zero-0",
        recompute=choice.recompute,
        blocking=("reductions",),
    )
    if refuse(job, layout) is not None:
        return None
    return build_plan(job, layout, weights).model_copy(update={"stack": "deepspeed"})
