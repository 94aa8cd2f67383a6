"""The table of plans that must all train like one process: a row is a model, a layout and its methods.

`Row.plan` makes the plan of a row, `train` executes it on a rank, `alone` of `one_process` is what it is
compared with, by `differences`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import Any

import torch
from equality_jobs import LOSSES, OPTIMIZERS, drop_out, samples
from late_accelerator import late_device
from one_process import HELD_OUT, Method, Outcome, Part, Told, Training, stepped, tensors_of
from small_jobs import SEED
from small_plans import make_plan, make_program

from weft.describe.families import layer_graph
from weft.describe.loss_choice import CHUNKED
from weft.describe.model import ModelConfig
from weft.describe.optimizers import ADAMW, KNOWN_OPTIMIZERS, counted_work
from weft.describe.plan import Choice, LayerChoice, Plan, Recompute, ReducePrecision, Replica, Sharding, Stage
from weft.planning.compile import compile_evaluation_part
from weft.program.rank_program import part_of
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stages
from weft.run.state.precision import PRECISIONS, STEPPED
from weft.run.step_result import StepResult
from weft.training.checkpoint.stage_tensors import model_tensors
from weft.training.checkpoint.tensor_shares import join_shares

# Of losses and of what methods tell, relative; of tensors, relative where they are larger than SMALL.
TOLERANCE = 1e-9
SMALL = 1e-3


@dataclass(frozen=True)
class Row:
    """One plan of a model, how it is trained, and how closely it must equal one process.

    Attributes:
        micro_batches: of each pipeline.
        shares: micro-batches of each replica, where they differ.
        layers: of each stage how many, or which, where not as many in each.
        splits: into how many parts each stage splits micro-batches.
        copies: the replicas of each stage in a pipeline, where they are unlike.
        degrees: the tensor ranks of each stage's replicas, where they are unlike.
        unlike: the tensor ranks of each stage in every pipeline, where pipelines are unlike.
        places: the devices of the stages in every pipeline, for the order `placed`.
        devices: the order of the devices, for `planned_by`.
        recompute: of all stages, or of each.
        loss: a name of `equality_jobs.LOSSES`; of shares of the logits where none is given.
        chunks: the tokens of a chunk of the loss, or "by size"; one process makes all logits at once.
        masks: whether most targets are left out, of ranks unlike many.
        tolerance: the largest difference, relative.
        same_bits: whether the order of all sums is that of one process, which adds up replica by replica.
        whole: the stages with whole backwards, of an order that splits those of the others.
        planned_by: makes the plan from the row, in place of `plan`.
    """

    model: ModelConfig
    schedule: str = "gpipe"
    pp: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    loops: int = 1
    micro_batches: int = 4
    micro_batch_size: int = 2
    shares: tuple[int, ...] = ()
    layers: tuple[int | tuple[int, ...], ...] = ()
    splits: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    degrees: tuple[int, ...] = ()
    unlike: tuple[tuple[int, ...], ...] = ()
    places: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    sharding: Sharding = "zero-0"
    island: int | None = None
    recompute: Recompute | tuple[Recompute, ...] = "none"
    whole: str = ""
    precision: str = "fp64"
    reduce_precision: ReducePrecision | None = None
    methods: tuple[Method, ...] = ()
    dropout: float = 0.0
    loss: str = ""
    chunks: int | str | None = None
    masks: bool = False
    optimizer: str = "descent"
    steps: int = 2
    evaluates: bool = False
    tolerance: float = TOLERANCE
    same_bits: bool = False
    planned_by: Callable[[Row], Plan] | None = None
    transport: str = "host"

    def __str__(self) -> str:
        changed = [
            (field.name, getattr(self, field.name))
            for field in fields(self)[1:]
            if getattr(self, field.name) != field.default
        ]
        words = [_words(name, value) for name, value in changed]
        return ", ".join([_model_words(self.model), *words])

    @property
    def plan(self) -> Plan:
        """Ranks go by pipeline, by stage, by expert rank, by context rank, then by tensor rank."""
        if self.planned_by is not None:
            return self.planned_by(self)
        plan = make_plan(
            self.model,
            pp=self.pp,
            dp=self.dp,
            loops=self.loops,
            schedule=self.schedule,
            micro_batches=self.micro_batches,
            micro_batch_size=self.micro_batch_size,
            precision=self.precision,
            copies=self.copies,
            degrees=self.degrees,
            unlike=self.unlike,
            places=self.places,
        )
        stages = tuple(self._stage(index, stage) for index, stage in enumerate(plan.stages))
        shares = [one.micro_batches for one in stages[0].replicas]
        degrees = {
            axis: size for axis, size in (("ep", self.ep), ("cp", self.cp), ("tp", self.tp)) if size > 1
        }
        return plan.model_copy(
            update={
                "stages": stages,
                "global_batch": sum(shares) * self.micro_batch_size,
                "mesh": {**plan.mesh, **degrees},
                **self.asked,
            }
        )

    @property
    def asked(self) -> dict[str, Any]:
        """What the plan says beside its stages."""
        syncs = [method.sync for method in self.methods if method.sync is not None]
        choices = tuple(choice for method in self.methods for choice in method.choices)
        sync = {"sync": syncs[0]} if syncs else {}
        layer_choices = tuple(choice for method in self.methods for choice in method.layer_choices)
        if self.chunks is not None:
            head = LayerChoice(name=CHUNKED, layers=(self.model.layers + 1,), value=self.chunks)
            layer_choices = (*layer_choices, head)
        sharing = {"sharding": self.sharding, "island": self.island}
        sharing["reduce_precision"] = self.reduce_precision
        known = self.optimizer in KNOWN_OPTIMIZERS or ":" in self.optimizer
        sharing["optimizer"] = counted_work(self.optimizer).work if known else ADAMW
        order = {"schedule": Choice(name=self.schedule, options={"whole": self.whole})} if self.whole else {}
        return {**sharing, "methods": choices, "layer_choices": layer_choices, **sync, **order}

    def _stage(self, index: int, stage: Stage) -> Stage:
        width = self.ep * self.cp * self.tp
        shares = self.shares or [one.micro_batches for one in stage.replicas]
        replicas = tuple(
            Replica(
                ranks=tuple(width * rank + place for rank in one.ranks for place in range(width)),
                micro_batches=share,
            )
            for one, share in zip(stage.replicas, shares, strict=True)
        )
        recompute = self.recompute if isinstance(self.recompute, str) else self.recompute[index]
        changes: dict[str, Any] = {"replicas": replicas, "recompute": recompute}
        if self.layers:
            changes["layers"] = self._layers_of(index)
        if self.splits:
            changes["splits"] = self.splits[index]
        return stage.model_copy(update=changes)

    def _layers_of(self, index: int) -> tuple[int, ...]:
        chosen = self.layers[index]
        if isinstance(chosen, tuple):
            return chosen
        return tuple(range(*list(pairwise(accumulate(self.layers, initial=0)))[index]))

    def training(self, plan: Plan) -> Training:
        """What one process does in its place."""
        shares = [one.micro_batches for one in plan.stages[0].replicas]
        in_parts = self.same_bits or any(one.by_replica or one.by_share for one in self.methods)
        return Training(
            model=self.model,
            micro_batch_size=self.micro_batch_size,
            parts=_parts(shares, self.island or len(shares)) if in_parts else range(sum(shares)),
            precision=self.precision,
            reduce_precision=self.reduce_precision,
            rounds_sums=self.reduce_precision is not None and self.sharding == "zero-0",
            dropout=self.dropout,
            loss=self.loss if self.loss in ("own", "clicks", "doses") else "whole",
            masks=self.masks,
            optimizer=self.optimizer,
            steps=self.steps,
            evaluates=self.evaluates,
            methods=self.methods,
        )

    @property
    def _loss(self) -> str:
        shared = "tokens" if self.cp * self.ep > 1 else "columns"
        return self.loss or (shared if self.chunks is None else "kernel")


def train(rank: int, ranks: int, row: Row, plan: Plan) -> Outcome:
    """What a rank of the plan tells and ends with."""
    stages = build_stages(plan, row.model, rank, SEED, STEPPED[plan.precision])
    drop_out(stages.values(), row.dropout)
    runtime = RankRuntime(
        plan,
        part_of(make_program(row.model, plan), rank),
        stages,
        LOSSES[row._loss],
        OPTIMIZERS[row.optimizer],
        device="cpu",
        seed=SEED,
        transport=row.transport,
        **{name: value for method in row.methods for name, value in method.runtime_options.items()},
    )
    for method in row.methods:
        method.attach(runtime)
    steps = []
    for step in range(row.steps):
        steps.append(_told(runtime.step(step, samples(row.model, plan, step, row.masks, plan.methods))))
        for method in row.methods:
            method.follow(runtime, step)
        if row.evaluates:
            # Whoever reads in the middle changes nothing.
            part = compile_evaluation_part(plan, layer_graph(row.model), rank)
            held_out = samples(row.model, plan, HELD_OUT, row.masks, plan.methods)
            steps[-1]["evaluated"] = [runtime.evaluate(part, [held_out])]
    masters = {}
    with runtime.settled():
        if STEPPED[plan.precision] != PRECISIONS[plan.precision]:
            own = model_tensors(runtime.stages, runtime.stepped)
            masters = stepped(join_shares(runtime.stages, own))
        tensors = whole_tensors(runtime) | masters
    if row.sharding == "zero-0":
        assert all(not bucket.flat.any() for bucket in runtime.buckets.values())
    for method in row.methods:
        method.check(runtime)
    runtime.close()
    assert not any(one._backward_hooks for module in stages.values() for one in module.parameters())
    return steps, tensors


def train_late(rank: int, ranks: int, row: Row, plan: Plan, seed: int) -> Outcome:
    """The same on an accelerator that is late."""
    with late_device(seed + rank, kernels=True):
        return train(rank, ranks, row, plan)


def _told(result: StepResult) -> Told:
    figures = {"loss": result.loss, **result.totals, **result.figures}
    return {**{name: [value] for name, value in figures.items()}, **result.series}


def whole_tensors(runtime: RankRuntime) -> dict[str, torch.Tensor]:
    """This rank's tensors, joined where it has shares; every rank calls it."""
    runtime.gather_weights()
    found: dict[str, torch.Tensor] = {}
    for module in runtime.stages.values():
        shares = getattr(module, "shares", {})
        for name, value in tensors_of(module).items():
            if name in shares:
                value = shares[name].join(value)
            assert torch.equal(found.setdefault(name, value), value), name
    return found


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """What all ranks tell, and every tensor, of which all that have it have the same bits."""
    steps, tensors = outcomes[0][0], {}
    for told, own in outcomes:
        assert told == steps
        for name, value in own.items():
            assert torch.equal(tensors.setdefault(name, value), value), name
    return steps, tensors


def tolerance_of(row: Row, name: str) -> float:
    """Up to which difference a tensor, or what is told by this name, equals that of one process."""
    return 0.0 if row.same_bits else row.tolerance


def differences(found: Outcome, expected: Outcome) -> dict[str, float]:
    """How far apart the two are by name, relative; infinitely where only one of them has it."""
    told, tensors = (_numbers(found[0]), _numbers(expected[0]), 0.0), (found[1], expected[1], SMALL)
    return {
        name: _difference(ours.get(name), theirs.get(name), small)
        for ours, theirs, small in (told, tensors)
        for name in {**ours, **theirs}
    }


def _numbers(steps: Sequence[Told]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([step[name] for step in steps], dtype=torch.float64) for name in steps[0]}


def _difference(found: torch.Tensor | None, expected: torch.Tensor | None, small: float) -> float:
    if found is None or expected is None or (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return float("inf")
    size = expected.double().abs() + small
    gaps = (found.double() - expected.double()).abs() / size
    return torch.where(found == expected, 0.0, gaps).max().item()


def _parts(shares: Sequence[int], island: int) -> Part:
    """The micro-batches of replicas, in the order in which their gradients are added up."""
    ranges = tuple(range(*pair) for pair in pairwise(accumulate(shares, initial=0)))
    islands = tuple(ranges[first : first + island] for first in range(0, len(ranges), island))
    return islands if len(islands) > 1 else ranges


def _model_words(config: ModelConfig) -> str:
    return f"{config.name} of {config.layers} and {config.sequence}{' tied' * config.tied_embeddings}"


def _words(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name
    if isinstance(value, tuple):
        return f"{name} {' '.join(map(str, value))}"
    value = getattr(value, "__name__", value)
    return value if name in {"schedule", "sharding", "precision"} else f"{name} {value}"
