"""The memory of a training step, tracked over fake tensors, and the predicted one.

One rank of the runtime trains its stage without computing anything: torch's fake tensors have sizes only.
`MemTracker` follows every storage, and `LiveStorages` those of passes in segments. What other ranks would
send is made up.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from fused_loss import installed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.loss_choice import WHOLE, Loss, loss_choices
from weft.describe.model import ModelConfig
from weft.describe.optimizers import FOREACH_ADAMW, WORK, counted_work
from weft.describe.plan import Choice, Plan, Recompute, Sharding
from weft.methods.expert_exchanges.program import CUTTER, Way
from weft.moves.layout import build_plan, flops_per_layer
from weft.planning.compile import compile_plan
from weft.predict.cost.memory import ALLOCATOR_SLACK
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import predict
from weft.program.segments import segments_of
from weft.run.parallel.expert_ranks import Dispatch, ExpertRanks
from weft.run.parallel.loss_input import loss_input
from weft.run.stage.build import build_stage
from weft.run.stage.expert_pieces import ExpertCut
from weft.run.stage.layer_choices import apply_choices
from weft.run.stage.layers import layer_functions, run_layers
from weft.run.stage.pieces import Tape
from weft.run.stage.segments import Finish, StageRun
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
    """A step of one micro-batch on one rank, or on one of so many tensor or expert ranks.

    Attributes:
        exchanges: of expert ranks, inside of passes or between segments; all experts are equally busy.
        stages: of the model, of which the rank has the last one.
        replicas: of the stage, which share it out at the level `sharding`.
    """

    model: ModelConfig
    micro_batch_size: int = 4
    precision: str = "fp32"
    recompute: Recompute = "none"
    tensor_parallel: int = 1
    expert_parallel: int = 1
    exchanges: Way = "inside"
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


class LiveStorages(TorchDispatchMode):
    """The bytes of all storages that operations make, now and at the peak, told as `MemTracker` tells them.

    `MemTracker` hangs hooks on modules, which keep the graphs of passes in segments.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self._live: dict[int, weakref.ref[Any]] = {}
        self._bytes = {"current": 0, "peak": 0}

    def track_external(self, stage: StageModule, optimizer: object, *held: torch.Tensor) -> None:
        for one in (*stage.parameters(), *stage.buffers(), *held):
            self._see(one)

    def get_tracker_snapshot(self, when: str) -> dict[str, dict[str, int]]:
        return {"all": {"Total": self._bytes[when]}}

    def reset_mod_stats(self) -> None:
        """Do nothing: modules have no part in it."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        given = function(*arguments, **(options or {}))
        for one in tree_leaves(given):
            if isinstance(one, torch.Tensor):
                self._see(one)
        return given

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._live:
            return

        def free(_: object) -> None:
            del self._live[key]
            self._bytes["current"] -= size

        self._live[key] = weakref.ref(storage, free)
        self._bytes["current"] += size
        self._bytes["peak"] = max(self._bytes.values())


class MadeUpGroup:
    """A group whose other ranks send nothing that has values."""

    place = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def add_up(self, flat: torch.Tensor, sent_as: torch.dtype | None = None) -> None:
        """Leave the tensor as it is: a sum takes its place."""

    def all_gather(self, flat: torch.Tensor, share: torch.Tensor) -> None:
        """Leave the tensor as it is: its room is there."""

    def all_to_all_rows(self, received: torch.Tensor, *sent: object) -> None:
        """Leave the tensor as it is: its room is there."""

    def reduce_scatter(self, flat: torch.Tensor, sent_as: torch.dtype | None = None) -> torch.Tensor:
        return flat.new_empty(len(flat) // self.size)


def planned_layout(step: TrackedStep) -> Layout:
    """The layout of the step."""
    return Layout(
        pp=step.stages,
        dp=step.replicas,
        tp=step.tensor_parallel,
        ep=step.expert_parallel,
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
        layers = planned(step)[0].stages[-1].layers
        stage = build_stage(
            step.model,
            layers,
            0,
            stepped_dtype,
            tensor_share=(0, step.tensor_parallel),
            expert_share=(0, step.expert_parallel),
        )
        assert isinstance(stage, StageModule)
        last = step.model.layers + 1
        apply_choices(loss_choices(planned_layout(step), last), stage, [last])
        if step.tensor_parallel > 1:
            stage.tensor.connect(MadeUpGroup(step.tensor_parallel))  # type: ignore[arg-type]  # as far as needed
        if step.expert_parallel > 1:
            stage.expert.connect(MadeUpGroup(step.expert_parallel))  # type: ignore[arg-type]
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
        tracker: MemTracker | LiveStorages = MemTracker() if step.exchanges == "inside" else LiveStorages()
        bucket, shard = states.buckets[0], states.shards.get(0)
        held = [piece.stepped.data for piece in states.stepped[0].pieces] if states.stepped else []
        held += [] if shard is None else [shard.own_gradient, shard.weights.own]
        # The prediction has room for all that a reduction brings, the runtime for a piece at a time.
        held += [] if shard is None else [torch.empty_like(bucket.flat)]
        tracker.track_external(stage, optimizer, bucket.flat, *held)
        resident = 0
        with (
            tracker,
            patch.object(ExpertRanks, "route", lambda ranks, counts: _route(step, ranks, counts)),
            patch.object(ExpertRanks, "mean", lambda ranks, total, count: total / count),
        ):
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
    taken = loss_input(stage, CausalLanguageModelling)

    if step.exchanges != "inside":
        _pass_in_segments(stage, step, samples, lambda output: cross_entropy(taken(output), targets))
        return
    *others, last = layer_functions(stage, samples)

    def loss(value: torch.Tensor) -> torch.Tensor:
        return cross_entropy(taken(last(value)), targets)

    run_layers([*others, loss], samples, recompute=step.recompute, draws=False).backward()


def _pass_in_segments(stage: StageModule, step: TrackedStep, samples: torch.Tensor, loss: Finish) -> None:
    plan, job = planned(step)
    owed = segments_of(compile_plan(plan, job.graph).obligations.methods)
    assert owed is not None, "expert ranks exchange between segments"
    group: Any = MadeUpGroup(step.expert_parallel)
    cut = ExpertCut.of(stage)
    assert cut is not None, "stages with experts say where they are cut"
    run, tape = StageRun(0, cut, owed.segments[-1], step.recompute), Tape()
    run.begin(tape, samples)
    value = samples
    for segment in range(run.last_forward + 1):
        value = run.run(tape, segment, value, loss)
        if segment < run.last_forward:
            value = run.cross(tape, segment, value, group, backward=False).requires_grad_()
    gradient: torch.Tensor | None = torch.ones_like(value)
    for segment in range(run.last_backward, -1, -1):
        gradient = run.go_back(tape, segment, gradient)[0]
        if segment > 0:
            assert gradient is not None, "rows of experts have gradients"
            gradient = run.cross(tape, segment - 1, gradient, group, backward=True)


def _route(step: TrackedStep, ranks: ExpertRanks, counts: torch.Tensor) -> Dispatch:
    """Return the way of rows if all experts are equally busy."""
    experts, tokens = step.model.architecture.experts, step.micro_batch_size * step.model.sequence
    assert experts is not None, "only experts have rows"
    rows = tokens // ranks.size * experts.active
    sent, order = [[rows // ranks.size] * ranks.size] * ranks.size, counts.new_empty(rows)
    return Dispatch(ranks, sent, counts[: len(counts) // ranks.size], order, order)


def _total(tracker: MemTracker | LiveStorages, when: str) -> int:
    return sum(parts["Total"] for parts in tracker.get_tracker_snapshot(when).values())


def planned(step: TrackedStep) -> tuple[Plan, Job]:
    """Return the step's plan and job."""
    ranks = step.tensor_parallel * step.expert_parallel * step.stages * step.replicas
    job = Job(
        graph=layer_graph(step.model),
        cluster=parse_cluster(CLUSTER.format(ranks=ranks)),
        global_batch=step.micro_batch_size * step.replicas,
        sequence=step.model.sequence,
        precision=step.precision,
        optimizer=counted_work(step.optimizer).work,
    )
    plan = build_plan(job, planned_layout(step), flops_per_layer(job))
    choices = (Choice(name=CUTTER.name, options={"run": step.exchanges}),)
    return plan.model_copy(update={"methods": choices if step.expert_parallel > 1 else ()}), job


def predicted(step: TrackedStep) -> TrackedBytes:
    """Return the predicted bytes of a rank, without the allocator's slack."""
    plan, job = planned(step)
    rank = plan.stages[-1].replicas[0].ranks[0]
    found = predict(CostModel(graph=job.graph, cluster=job.cluster), plan, compile_plan(plan, job.graph))
    held = found.prediction.peak_bytes[rank], int(found.priced.costs.base_bytes[rank])
    return TrackedBytes(*(round(each / (1.0 + ALLOCATOR_SLACK)) for each in held))
