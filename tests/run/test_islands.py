"""Islands begin with equal values, and their checkpoints pass to islands of other sizes.

That they train like one process: `tests/methods/rows/sharding.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from asked_methods import CLIPS
from pool import WorkerPool
from saved_checkpoints import save_checkpoint
from small_jobs import SEED, batch_of, descent, loss_of, make_runtime
from small_plans import make_plan, make_program, tiny

from weft.describe.plan import Plan, Sharding
from weft.program.rank_program import part_of
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stage
from weft.training.checkpoint import checkpoints
from weft.training.checkpoint.stage_tensors import model_tensors, optimizer_tensors
from weft.training.checkpoint.training_state import TrainingState
from weft.training.optimizer.optimizers import OptimizerSettings, optimizer_factory

pytestmark = pytest.mark.processes

CONFIG = tiny()
STEPS = 2
CLIP_NORM = 0.4
SHARDINGS: tuple[Sharding, ...] = ("zero-1", "zero-2", "zero-3")
ADAMW = OptimizerSettings(
    name="adamw", learning_rate=0.05, warm_up_steps=0, betas=(0.9, 0.95), weight_decay=0.2
)
STATE = TrainingState(
    step=STEPS,
    plan_id="f00d",
    seed=3,
    samples=8,
    model="cafe",
    precision="fp32",
    data="beef",
    first_loss=5.5,
)
Tensors = dict[str, torch.Tensor]


def plan_of(sharding: Sharding, island: int | None = 2, *, clips: bool = False, **sizes: object) -> Plan:
    """Four replicas of everything."""
    plan = make_plan(CONFIG, **{"dp": 4, "micro_batches": 2, **sizes})
    return plan.model_copy(update={"sharding": sharding, "island": island, "methods": CLIPS if clips else ()})


def state_of(runtime: RankRuntime) -> Tensors:
    """Whole parameters and states that begin in the ranges that this rank steps."""
    weights = model_tensors(runtime.stages, runtime.stepped)
    states = optimizer_tensors(runtime.stages, runtime.optimizers, runtime.stepped)
    return {name: value.clone() for name, value in (weights | states).items()}


def together(parts: list[Tensors]) -> Tensors:
    """One tensor per name; ranks that name the same, those of several islands, hold the same."""
    whole: Tensors = {}
    for part in parts:
        for name, value in part.items():
            assert torch.equal(whole.setdefault(name, value), value), name
    return whole


def begin_apart(rank: int, ranks: int, plan: Plan) -> bool:
    """Whether replicas that are given other values each begin with those of the first."""
    stages = {0: build_stage(CONFIG, plan.stages[0].layers, SEED + rank, torch.float64)}
    expected = build_stage(CONFIG, plan.stages[0].layers, SEED, torch.float64).state_dict()
    runtime = RankRuntime(
        plan, part_of(make_program(CONFIG, plan), rank), stages, loss_of, descent, device="cpu", seed=SEED
    )
    runtime.gather_weights()
    found = runtime.stages[0].state_dict()
    runtime.close()
    return all(torch.equal(found[name], value) for name, value in expected.items())


def test_islands_begin_with_the_values_of_the_first_replica(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(begin_apart, plan_of("zero-3"), ranks=4) == [True] * 4


def runtime_of(rank: int, plan: Plan, generation: int) -> RankRuntime:
    return make_runtime(
        rank,
        CONFIG,
        plan,
        make_program(CONFIG, plan),
        optimizer_factory=optimizer_factory(ADAMW),
        generation=generation,
    )


def save_and_restore(
    rank: int, ranks: int, source: Plan, others: list[Plan], directory: Path
) -> tuple[Tensors, list[Tensors]]:
    """What a plan saves after some steps, and what others read of it."""
    runtime = runtime_of(rank, source, 0)
    for step in range(STEPS):
        runtime.step(step, batch_of(CONFIG, source, step))
    save_checkpoint(directory, STATE, runtime.stages, runtime.optimizers, runtime.stepped, keep=1)
    saved = state_of(runtime)
    runtime.close()
    path, _ = checkpoints.agree_on_newest(directory)
    assert path is not None
    restored = []
    for generation, plan in enumerate(others, start=1):
        runtime = runtime_of(rank, plan, generation)
        assert checkpoints.load(path, runtime.stages, runtime.optimizers, runtime.stepped) == STATE
        restored.append(state_of(runtime))
        runtime.close()
    return saved, restored


@pytest.mark.parametrize(("source", "island"), [("zero-3", 2), ("zero-1", None)])
def test_checkpoints_pass_between_islands_and_none(
    worker_pool: WorkerPool, tmp_path: Path, source: Sharding, island: int | None
) -> None:
    looped = {"loops": 3, "schedule": "breadth-first", "precision": "fp32"}
    others = [plan_of(level, size, **looped) for level, size in (("zero-3", 2), ("zero-2", None))]
    answers = worker_pool.run(
        save_and_restore, plan_of(source, island, **looped), others, tmp_path / "checkpoints", ranks=4
    )
    saved = together([answer for answer, _ in answers])
    # Three states for each of the model's parameters.
    assert len(saved) == 4 * sum("/" not in name for name in saved)
    for number in range(len(others)):
        found = together([restored[number] for _, restored in answers])
        assert set(found) == set(saved)
        for name, value in saved.items():
            assert torch.equal(found[name], value), name
