"""`weft.Runtime`: a plan executed from inside a user's own program, under `torchrun` or `weft`'s agent.

runtime = weft.Runtime("plan.json", "gpt-1m", loss_fn)
for inputs, targets in batches:
    loss = runtime.step(inputs, targets)
runtime.close()
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import nn

from weft.describe.added_layers import trained_graph
from weft.describe.layer_choices import with_choices
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.one_line import one_line
from weft.describe.plan import MICRO_BATCH_CLIPPING, PACKING, Plan
from weft.describe.plan_file import given_plan
from weft.describe.units import counted, shown
from weft.errors import InputError, Violation
from weft.planning.compile import compile_part, compile_plan
from weft.program.rank_program import RankProgram, digests
from weft.program.verify import verify
from weft.run.accelerator import current_device
from weft.run.launch.worker_start import start_worker
from weft.run.resources import LossFunction, OptimizerFactory
from weft.run.runtime import RankRuntime, require_runnable
from weft.run.stage.build import build_stages
from weft.run.state.precision import STEPPED
from weft.run.supported import planned_only, unsupported
from weft.run.verified import require_verified
from weft.run.workspace import Inputs

# Makes the module of one stage from the positions of its layers.
StageBuilder = Callable[[Sequence[int]], nn.Module]


def adamw(stage: nn.Module) -> torch.optim.Optimizer:
    """Return the default optimizer of a stage."""
    return torch.optim.AdamW(stage.parameters(), lr=1e-3)


class Runtime:
    """One rank of a plan; every rank of the job makes one and calls `step` equally often.

    It joins the job's process group if the program has not done so. It writes no checkpoints: `weft train`
    does, of your own modules, tasks and optimizers, too.

    Args:
        plan: a Plan, or the path of a plan file.
        model: a preset's name, a folder with a `config.json`, `mymodule:build`, or a `ModelConfig`. The
            weights of a folder are not read: `seed` draws parameters. Captured models keep theirs.
        loss_fn: (logits of shape (micro_batch_size, sequence, vocabulary), targets) to the mean loss of the
            micro-batch.
        optimizer_factory: makes the optimizer of one stage; default AdamW at 1e-3.
        stage_builder: makes a stage's module from the positions of its layers, instead of weft's own; the
            module must have `forward`, `input_shape` and `output_shape` as
            `weft.run.stage.stage_module.RunnableStage` has.
        seed: the seed of the initial parameters and of dropout.
        clip_norm: the largest norm of the whole gradient to step with.
        skip_non_finite: leave out a step whose gradient is not finite. This and `clip_norm` need a plan with
            the method `gradient-norm`.
        transport: the way of messages and sums, `host` or `device`; None chooses by the device.

    Raises:
        InputError: when the plan is not for this model or these ranks, or cannot be executed.
        RunError: when the ranks do not meet.
    """

    def __init__(
        self,
        plan: Plan | str | Path,
        model: ModelConfig | str | Path,
        loss_fn: LossFunction,
        *,
        optimizer_factory: OptimizerFactory = adamw,
        stage_builder: StageBuilder | None = None,
        seed: int = 0,
        clip_norm: float | None = None,
        skip_non_finite: bool = False,
        transport: str | None = None,
    ) -> None:
        self.plan = given_plan(plan)
        _require_kinds(model, clip_norm, loss_fn=loss_fn, optimizer_factory=optimizer_factory)
        if not isinstance(model, ModelConfig):
            model = resolve_model(os.fspath(model), sequence=self.plan.sequence)
        graph = with_choices(trained_graph(model, self.plan.methods), self.plan.layer_choices)
        if graph.fingerprint != self.plan.model_fingerprint:
            raise InputError(
                Violation("runtime", f"the plan is for {self.plan.model}, not for this {model.name}")
            )
        if problems := (planned_only(model) if stage_builder is None else []) + unsupported(self.plan):
            raise InputError(problems)
        clipping = self.plan.method(MICRO_BATCH_CLIPPING)
        if clipping is not None and clipping.options.get("sources", 1) != 1:
            problem = "the plan clips by sources, and a loop of your own does not tell those of its samples"
            raise InputError(Violation("runtime", problem))
        if self.plan.method(PACKING) is not None:
            problem = "the plan packs samples, and a loop of your own does not tell their documents"
            raise InputError(Violation("runtime", problem))
        if self.plan.layer_choices and stage_builder is not None:
            problem = "the plan chooses how layers run, which only weft's own stages follow"
            raise InputError(Violation("runtime.stage_builder", problem))
        self._context = None if dist.is_initialized() else start_worker(transport=transport)
        device = self._context.device if self._context is not None else current_device()
        rank = dist.get_rank()
        if dist.get_world_size() != self.plan.ranks:
            raise InputError(
                Violation(
                    "runtime",
                    f"the job has {counted(dist.get_world_size(), 'rank')}, the plan has {self.plan.ranks}",
                )
            )
        program = _verified_part(self.plan, graph, rank)
        require_runnable(self.plan, program)
        dtype = STEPPED[self.plan.precision]
        built: Mapping[int, nn.Module] = (
            build_stages(self.plan, model, rank, seed, dtype)
            if stage_builder is None
            else {index: stage_builder(self.plan.stages[index].layers) for index in self.plan.stages_of(rank)}
        )
        stages = {index: stage.to(device) for index, stage in built.items()}
        self._runtime = RankRuntime(
            self.plan,
            program,
            stages,
            loss_fn,
            optimizer_factory,
            device=device,
            seed=seed,
            clip_norm=clip_norm,
            skip_non_finite=skip_non_finite,
            transport=transport,
        )
        self._rank, self._steps = rank, 0

    def __repr__(self) -> str:
        of = f"rank {self._rank} of {self.plan.ranks}"
        return one_line(
            self, f"{of}: plan {self.plan.plan_id} of {self.plan.model}, {counted(self._steps, 'step')} done"
        )

    @property
    def stages(self) -> dict[int, nn.Module]:
        """This rank's modules by stage.

        Call `gather_weights` before you read parameters that replicas shard, or running statistics.
        """
        return dict(self._runtime.stages)

    def gather_weights(self) -> None:
        """Bring the parameters and statistics of `stages` up to date; every rank must call it."""
        self._runtime.gather_weights()

    def step(self, inputs: Inputs, targets: torch.Tensor) -> float:
        """Train one optimizer step and return the mean loss of the global batch.

        Args:
            inputs, targets: the whole global batch, first axis `global_batch`; the same on every rank. The
                inputs of a model with several are a tuple.

        Raises:
            InputError: when the batch is no tensors, or has another size.
            RunError: names the instruction that failed.
        """
        read = inputs if isinstance(inputs, tuple) else (inputs,)
        for one in (*read, targets):
            if not isinstance(one, torch.Tensor):
                raise InputError(Violation("runtime.step", f"{type(one).__name__}: must be a tensor"))
        if any(one.shape[:1] != (self.plan.global_batch,) for one in (*read, targets)):
            given = " and ".join(str(list(one.shape)) for one in read)
            problem = (
                f"inputs of shapes {given}, targets of {list(targets.shape)}; the plan's global batch is"
            )
            raise InputError(Violation("runtime.step", f"{problem} {self.plan.global_batch}"))
        size = self.plan.micro_batch_size

        def batch(micro_batch: int) -> tuple[Inputs, torch.Tensor]:
            samples = slice(micro_batch * size, (micro_batch + 1) * size)
            taken = tuple(one[samples] for one in read)
            return taken if isinstance(inputs, tuple) else taken[0], targets[samples]

        loss = self._runtime.step(self._steps, batch).loss
        self._steps += 1
        return loss

    def close(self, *, failed: bool = False) -> None:
        """Finish the work under way; leave the process group if this object joined it.

        If it failed, the other ranks are told that this one is gone.
        """
        self._runtime.close(failed=failed)
        context, self._context = self._context, None
        if context is not None:
            context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)


def _require_kinds(model: object, clip_norm: float | None, **functions: object) -> None:
    """Refuse arguments of wrong kinds."""
    problems = [
        Violation(f"runtime.{name}", f"{shown(value)}: must be a function")
        for name, value in functions.items()
        if not callable(value)
    ]
    if not isinstance(model, ModelConfig | str | os.PathLike):
        problems.append(
            Violation("runtime.model", f"{shown(model)}: must be a name, a path or a ModelConfig")
        )
    if clip_norm is not None and not (isinstance(clip_norm, int | float) and clip_norm > 0):
        problems.append(Violation("runtime.clip_norm", f"{shown(clip_norm)}: must be greater than 0"))
    if problems:
        raise InputError(problems)


def _verified_part(plan: Plan, graph: LayerGraph, rank: int) -> RankProgram:
    """Return this rank's part of the program after rank 0 has verified the whole; every rank calls it.

    Raises:
        InputError: when the plan cannot be compiled, or rank 0 refuses its program.
    """
    part = compile_part(plan, graph, rank)
    if rank != 0:
        require_verified([part], None)
        return part
    program = compile_plan(plan, graph)
    problems = verify(program)
    require_verified([part], None if problems else [digests(program)])
    if problems:
        raise InputError(problems)
    return part
