"""Law: what a synchroniser leaves unsent on a rank is there again after a resumed start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from pool import WorkerPool
from saved_checkpoints import save_checkpoint
from small_jobs import SEED, batch_of, make_runtime, parameters_of
from small_plans import make_plan, make_program, tiny

from weft.run import resources
from weft.sync.base import Meeting
from weft.sync.dense import Dense
from weft.training.checkpoint import checkpoints
from weft.training.checkpoint.training_state import TrainingState

pytestmark = pytest.mark.processes


class ErrorFeedback(Dense):
    """Sends eight bits of each number, and what is left of it with the next one."""

    def __init__(self) -> None:
        self.errors: dict[int, torch.Tensor] = {}
        self.met: list[tuple[int, int]] = []

    def begin(self, stage: int, flat: torch.Tensor) -> None:
        self.errors[stage] = flat.clone()

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {f"error/{stage}": error for stage, error in self.errors.items()}

    def reduce(self, gradient: torch.Tensor, meeting: Meeting) -> None:
        self.met.append((meeting.stage, meeting.step))
        error = self.errors[meeting.stage]
        whole = gradient + error
        gradient.copy_(whole.bfloat16())
        error.copy_(whole - gradient)
        super().reduce(gradient, meeting)


def resume(
    rank: int, ranks: int, folder: Path
) -> tuple[list[dict[str, torch.Tensor]], list[tuple[int, int]]]:
    """Parameters after four steps, of one start and of two."""
    config = tiny(layers=2)
    plan = make_plan(config, dp=2, loops=2, schedule="breadth-first", precision="fp32")
    program, found = make_program(config, plan), []
    state = TrainingState(
        step=2, plan_id=plan.plan_id, seed=SEED, samples=0, model="", precision="", data="", first_loss=0.0
    )
    for number, (start, end) in enumerate(((0, 4), (0, 2), (2, 4))):
        one = ErrorFeedback()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resources, "get_synchroniser", lambda choice, one=one: one)
            runtime = make_runtime(rank, config, plan, program, generation=number)
        parts = runtime.stages, runtime.optimizers, runtime.stepped, runtime.methods
        if start:
            checkpoints.load(folder / "step-00000002", *parts, plan_ids={plan.plan_id})
        for step in range(start, end):
            runtime.step(step, batch_of(config, plan, step))
        runtime.gather_weights()
        if end == 2:
            save_checkpoint(folder, state, *parts, keep=1)
        found.append(parameters_of(runtime))
        runtime.close()
    return found, one.met


def test_error_feedback_is_resumed_to_the_bit(worker_pool: WorkerPool, tmp_path: Path) -> None:
    for (whole, half, resumed), met in worker_pool.run(resume, tmp_path, ranks=2):
        assert all(torch.equal(value, whole[name]) for name, value in resumed.items())
        assert any(not torch.equal(value, whole[name]) for name, value in half.items())
        assert sorted(met) == [(0, 2), (0, 3), (1, 2), (1, 3)]
