"""`[train] compile`: the compilation of a rank's stages before the first step, with inputs of true shapes."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from weft.errors import InputError
from weft.planning.planned import PlannedJob
from weft.program.rank_program import RankProgram
from weft.run.stage.compilable import compile_problems
from weft.run.state.precision import PRECISIONS
from weft.training.coordination.agreement import together
from weft.training.tasks.base import Task

# Ranks with less to compile wait for ranks with stages that compile longer.
TIMEOUT_S = 1800.0


def compile_stages(
    job: PlannedJob, program: RankProgram, stages: Mapping[int, nn.Module], task: Task, device: str
) -> None:
    """Compile the stages in place if the run file says so; every rank calls it and waits for all ranks.

    Raises:
        InputError: if the plan or a layer cannot be compiled.
    """
    if not job.run.train.compile:
        return
    # This imports torch's compiler, which takes a second.
    from weft.run.stage.compiled import compile_stage

    group = dist.new_group(
        backend="gloo", timeout=timedelta(seconds=TIMEOUT_S), group_desc="weft compilation"
    )
    with together(group):
        problems = compile_problems(job.plan, program.columns.kind, job.problem.job.graph)
        if problems:
            raise InputError(problems)
        for index, stage in stages.items():
            compile_stage(
                stage,
                _inputs(job, index, stage, task).to(device),
                dtype=PRECISIONS[job.plan.precision],
                recompute=job.plan.stages[index].recompute,
            )
    dist.destroy_process_group(group)


def _inputs(job: PlannedJob, index: int, stage: nn.Module, task: Task) -> torch.Tensor:
    """Return one micro-batch's input to the stage: samples for the first stage, zeros for the others."""
    plan = job.plan
    if 0 in plan.stages[index].layers:
        return task.batch(np.zeros(plan.size_of(index), dtype=np.int64))[0]
    shape = stage.input_shape(plan.size_of(index), plan.sequence)  # type: ignore[operator]
    return torch.zeros(shape, dtype=PRECISIONS[plan.precision], requires_grad=True)
