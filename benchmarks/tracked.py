"""The memory of a training step, tracked over fake tensors, and the predicted one.

One rank of the runtime trains its stage without computing anything: torch's fake tensors have sizes only.
`MemTracker` follows every storage. What other ranks would send is made up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from fused_loss import installed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.loss_choice import WHOLE, Loss, loss_choices
from weft.describe.model import ModelConfig
from weft.describe.optimizers import FOREACH_ADAMW, WORK, counted_work
from weft.describe.plan import Plan, Recompute, Sharding
from weft.moves.layout import build_plan, flops_per_layer
from weft.planning.compile import compile_plan
from weft.predict.cost.memory import ALLOCATOR_SLACK
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import predict
from weft.run.parallel.loss_input import loss_input
from weft.run.stage.build import build_stage
from weft.run.stage.layer_choices import apply_choices
from weft.run.stage.layers import layer_functions, run_layers
from weft.run.stage.stage_module import StageModule
from weft.run.state.bucket import FlatLayout
from weft.run.state.precision import PRECISIONS, STEPPED, lower_precision
from weft.run.state.states import make_states
from weft.sync.base import Meeting
from weft.training.optimizer.optimizers import BETAS, OptimizerSettings, optimizer_factory
from weft.training.tasks.base import cross_entropy
from weft.training.tasks.text import CausalLanguageModelling

CLUSTER = "{ranks}xh100-80gb"


def foreach_adamw(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """Build torch's AdamW over a list of all tensors, as other programs use it on a GPU by default."""
    parameters = [one for group in groups for one in group["params"]]
    return torch.optim.AdamW(parameters, lr=lr, betas=BETAS, foreach=True)


setattr(foreach_adamw, WORK, FOREACH_ADAMW)
FOREACH = f"{__name__}:{foreach_adamw.__name__}"


@dataclass(frozen=True, kw_only=True)
class TrackedStep:
    """A step of one micro-batch on one rank, or on one of so many tensor ranks.

    Attributes:
        stages: of the model, of which the rank has the last one.
        replicas: of the stage, which share it out at the level `sharding`.
    """

    model: ModelConfig
    micro_batch_size: int = 4
    precision: str = "fp32"
    recompute: Recompute = "none"
    tensor_parallel: int = 1
    optimizer: str = "adamw"
    loss: Loss = WHOLE
    stages: int = 1
    replicas: int = 1
    sharding: Sharding = "zero-0"


@dataclass(frozen=True)
class TrackedBytes:
    """Bytes at the peak of a step, of which `resident_bytes` stay between steps."""

    peak_bytes: int
    resident_bytes: int


class MadeUpGroup:
    """A group whose other ranks send nothing that has values."""

    place = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def add_up(self, flat: torch.Tensor, sent_as: torch.dtype | None = None) -> None:
        """Leave the tensor as it is: a sum takes its place."""

    def all_gather(self, flat: torch.Tensor, share: torch.Tensor) -> None:
        """Leave the tensor as it is: its room is there."""

    def reduce_scatter(self, flat: torch.Tensor, sent_as: torch.dtype | None = None) -> torch.Tensor:
        return flat.new_empty(len(flat) // self.size)


def planned_layout(step: TrackedStep) -> Layout:
    """The layout of the step."""
    return Layout(
        pp=step.stages,
        dp=step.replicas,
        tp=step.tensor_parallel,
        loops=1,
        micro_batch_size=step.micro_batch_size,
        schedule="gpipe",
        sharding=step.sharding,
        recompute=step.recompute,
        loss=step.loss,
    )


def inputs(step: TrackedStep) -> tuple[torch.Tensor, torch.Tensor]:
    """A micro-batch and its targets."""
    model, size = step.model, step.micro_batch_size
    if model.image_size:
        images = torch.randn(size, model.channels, model.image_size, model.image_size)
        return images.to(PRECISIONS[step.precision]), torch.randint(0, model.vocabulary, (size,))
    tokens = torch.randint(0, model.vocabulary, (size, model.sequence))
    if step.stages == 1:
        return tokens, tokens.clone()
    received = torch.randn(size, model.sequence, model.hidden, dtype=PRECISIONS[step.precision])
    return received.requires_grad_(), tokens


def tracked(step: TrackedStep) -> TrackedBytes:
    """Track the second step; the first one makes the optimizer's states."""
    dtype, stepped_dtype = PRECISIONS[step.precision], STEPPED[step.precision]
    # Buffers on the meta device are no fake tensors.
    with FakeTensorMode(allow_non_fake_inputs=True), installed():
        share = (0, step.tensor_parallel)
        layers = planned(step)[0].stages[-1].layers
        stage = build_stage(step.model, layers, 0, stepped_dtype, tensor_share=share)
        assert isinstance(stage, StageModule)
        last = step.model.layers + 1
        apply_choices(loss_choices(planned_layout(step), last), stage, [last])
        if step.tensor_parallel > 1:
            stage.tensor.connect(MadeUpGroup(step.tensor_parallel))  # type: ignore[arg-type]  # as far as needed
        settings = OptimizerSettings(name=step.optimizer, learning_rate=1e-3, weight_decay=0.1)
        optimizer = optimizer_factory(settings)(stage)
        others: Any = MadeUpGroup(step.replicas)
        states = make_states(
            {0: FlatLayout.of(stage, step.replicas)},
            {0: optimizer},
            {0: Meeting(group=others)} if step.replicas > 1 else {},
            step.sharding,
            dtype=dtype,
            stepped_dtype=stepped_dtype,
        )
        lower_precision([*stage.parameters()], dtype)
        tracker = MemTracker()
        bucket, shard = states.buckets[0], states.shards.get(0)
        held = [piece.stepped.data for piece in states.stepped[0].pieces] if states.stepped else []
        held += [] if shard is None else [shard.own_gradient, shard.weights.own]
        # The prediction has room for all that a reduction brings, the runtime for a piece at a time.
        held += [] if shard is None else [torch.empty_like(bucket.flat)]
        tracker.track_external(stage, optimizer, bucket.flat, *held)
        resident = 0
        with tracker:
            for number in range(2):
                if shard is not None:
                    shard.gather()
                    bucket.claim()
                _pass_both_ways(stage, step)
                if shard is not None:
                    shard.weights.free()
                    shard.take_in(others.reduce_scatter(bucket.flat), 0)
                    bucket.hand_back()
                optimizer.step()
                if shard is None:
                    bucket.clear()
                if number == 0:
                    resident = _total(tracker, "current")
                    tracker.reset_mod_stats()
        return TrackedBytes(_total(tracker, "peak"), resident)


def _pass_both_ways(stage: StageModule, step: TrackedStep) -> None:
    samples, targets = inputs(step)
    *others, last = layer_functions(stage, samples)
    taken = loss_input(stage, CausalLanguageModelling)

    def loss(value: torch.Tensor) -> torch.Tensor:
        return cross_entropy(taken(last(value)), targets)

    run_layers([*others, loss], samples, recompute=step.recompute, draws=False).backward()


def _total(tracker: MemTracker, when: str) -> int:
    return sum(parts["Total"] for parts in tracker.get_tracker_snapshot(when).values())


def planned(step: TrackedStep) -> tuple[Plan, Job]:
    """Return the step's plan and job."""
    ranks = step.tensor_parallel * step.stages * step.replicas
    job = Job(
        graph=layer_graph(step.model),
        cluster=parse_cluster(CLUSTER.format(ranks=ranks)),
        global_batch=step.micro_batch_size * step.replicas,
        sequence=step.model.sequence,
        precision=step.precision,
        optimizer=counted_work(step.optimizer).work,
    )
    return build_plan(job, planned_layout(step), flops_per_layer(job)), job


def predicted(step: TrackedStep) -> TrackedBytes:
    """Return the predicted bytes of a rank, without the allocator's slack."""
    plan, job = planned(step)
    rank = plan.stages[-1].replicas[0].ranks[0]
    found = predict(CostModel(graph=job.graph, cluster=job.cluster), plan, compile_plan(plan, job.graph))
    held = found.prediction.peak_bytes[rank], int(found.priced.costs.base_bytes[rank])
    return TrackedBytes(*(round(each / (1.0 + ALLOCATOR_SLACK)) for each in held))
