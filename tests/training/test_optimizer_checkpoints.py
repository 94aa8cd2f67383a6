"""Every optimizer goes on from a checkpoint to the bits that it would have come to without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from asked_methods import CLIPS
from pool import WorkerPool
from saved_checkpoints import save_checkpoint
from small_jobs import batch_of, make_runtime, parameters_of
from small_plans import make_plan, make_program, tiny

from weft.describe.optimizers import counted_work
from weft.run.runtime import RankRuntime
from weft.training.checkpoint import checkpoints
from weft.training.checkpoint.checkpoints import TrainingState
from weft.training.optimizer.optimizers import OptimizerSettings, optimizer_factory

pytestmark = pytest.mark.processes

CONFIG = tiny(layers=1)
STATE = TrainingState(
    step=2,
    plan_id="f00d",
    seed=3,
    samples=8,
    model="cafe",
    precision="fp64",
    data="beef",
    first_loss=5.5,
)
PLAN = make_plan(CONFIG, dp=2, micro_batches=2).model_copy(update={"sharding": "zero-1"})


def runtime_of(rank: int, settings: OptimizerSettings) -> RankRuntime:
    work = counted_work(settings.name, momentum=settings.momentum).work
    methods = CLIPS if work.unit_gradient else ()
    plan = PLAN.model_copy(update={"optimizer": work, "methods": methods})
    return make_runtime(
        rank, CONFIG, plan, make_program(CONFIG, plan), optimizer_factory=optimizer_factory(settings)
    )


def trained(runtime: RankRuntime, steps: range) -> dict[str, torch.Tensor]:
    for step in steps:
        runtime.step(step, batch_of(CONFIG, PLAN, step))
    runtime.gather_weights()
    return parameters_of(runtime)


def go_on(rank: int, ranks: int, settings: OptimizerSettings, directory: Path) -> bool:
    """Whether four steps and two with two more after a checkpoint are the same."""
    runtime = runtime_of(rank, settings)
    trained(runtime, range(2))
    save_checkpoint(directory, STATE, runtime.stages, runtime.optimizers, runtime.stepped, keep=1)
    straight = trained(runtime, range(2, 4))
    runtime.close()
    again = runtime_of(rank, settings)
    path, _ = checkpoints.agree_on_newest(directory)
    assert path is not None
    checkpoints.load(path, again.stages, again.optimizers, again.stepped)
    resumed = trained(again, range(2, 4))
    again.close()
    return all(torch.equal(straight[name], resumed[name]) for name in straight)


@pytest.mark.parametrize(
    ("name", "momentum"),
    [
        *((name, 0.0) for name in ("adam", "lamb", "nvlamb", "lans", "muon", "sgd")),
        *((name, 0.9) for name in ("sgd", "own_optimizers:SignMomentum", "own_optimizers:Shortening")),
    ],
)
def test_a_resumed_optimizer_steps_as_if_nothing_had_happened(
    worker_pool: WorkerPool, tmp_path: Path, name: str, momentum: float
) -> None:
    settings = OptimizerSettings(name=name, learning_rate=0.05, weight_decay=0.2, momentum=momentum)
    assert worker_pool.run(go_on, settings, tmp_path / "checkpoints", ranks=2) == [True, True]
