"""Law: what one plan saved every other plan restores, tensor by tensor, and trains on to the same bits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from pool import WorkerPool
from saved_checkpoints import save_checkpoint
from small_jobs import batch_of, make_runtime
from small_plans import make_plan, make_program, tiny

from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.run.runtime import RankRuntime
from weft.training.checkpoint import checkpoints
from weft.training.checkpoint.checkpoints import TrainingState
from weft.training.checkpoint.stage_tensors import model_tensors, optimizer_tensors
from weft.training.checkpoint.tensor_shares import join_shares
from weft.training.optimizer.optimizers import OptimizerSettings, optimizer_factory

pytestmark = pytest.mark.processes

CONFIG, TIED = tiny(), tiny(tied=True)
STEPS = 2
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
ADAMW = OptimizerSettings(
    name="adamw", learning_rate=0.05, warm_up_steps=0, betas=(0.9, 0.95), weight_decay=0.2
)
Tensors = dict[str, torch.Tensor]


def plan_of(
    sharding: str,
    *,
    pp: int = 1,
    dp: int = 2,
    loops: int = 1,
    precision: str = "fp32",
    schedule: str = "breadth-first",
    config: ModelConfig = CONFIG,
) -> Plan:
    """Two pipelines and one train on the same global batch; their sums differ in order, not their tensors."""
    plan = make_plan(
        config,
        pp=pp,
        dp=dp,
        loops=loops,
        schedule=schedule,
        micro_batches=4 // dp,
        precision=precision,
    )
    return plan.model_copy(update={"sharding": sharding})


PLANS = {
    "one process": plan_of("zero-0", dp=1),
    "replicas": plan_of("zero-0"),
    "optimizer shared out": plan_of("zero-1"),
    "gradients shared out": plan_of("zero-2", loops=3),
    "four shares": plan_of("zero-1", dp=4),
    "pipelines of shares": plan_of("zero-2", pp=2, loops=2),
    "weights shared out": plan_of("zero-3", loops=3),
    "unlike replicas": make_plan(
        CONFIG, pp=2, schedule="1f1b", micro_batches=4, precision="fp32", copies=(1, 2)
    ),
    "unlike tensor ranks": make_plan(
        CONFIG, pp=2, schedule="1f1b", micro_batches=4, precision="fp32", degrees=(1, 2)
    ),
    "in 16 bits": plan_of("zero-0", precision="bf16"),
    "shares in 16 bits": plan_of("zero-3", pp=2, loops=2, precision="bf16"),
}


of_tied = partial(plan_of, config=TIED)
# Copies of one weight are in stages whose shards begin elsewhere, in one rank or in several, or whole.
TIED_PLANS = {
    "shares of copies": of_tied("zero-3", pp=2, loops=2),
    "two copies on a rank": of_tied("zero-1", pp=2, loops=2, schedule="zb-v"),
    "one process": of_tied("zero-0", dp=1),
    "shares in 16 bits, in both directions": of_tied("zero-2", pp=2, schedule="chimera", precision="bf16"),
    "whole copies": of_tied("zero-0", pp=2, loops=2),
    "two whole copies on a rank": of_tied("zero-0", dp=1, loops=2),
}
# Where all parts of parameters fill whole vectors, unlike replicas step with the same bits.
WIDE = replace(CONFIG, hidden=64, feed_forward=64)
WIDE_PLANS = {
    "replicas of unlike tensor ranks": make_plan(
        WIDE, dp=2, schedule="1f1b", micro_batches=2, precision="fp32", unlike=((2,), (1,))
    ),
    "one process of wide layers": plan_of("zero-0", dp=1, config=WIDE),
}
ALL_PLANS = [(CONFIG, PLANS, source) for source in PLANS]
ALL_PLANS += [(TIED, TIED_PLANS, source) for source in TIED_PLANS]
ALL_PLANS += [(WIDE, WIDE_PLANS, source) for source in WIDE_PLANS]


def runtime_of(rank: int, config: ModelConfig, plan: Plan) -> RankRuntime:
    return make_runtime(
        rank, config, plan, make_program(config, plan), optimizer_factory=optimizer_factory(ADAMW)
    )


def state_of(runtime: RankRuntime) -> Tensors:
    """Every whole tensor of the model and its optimizers that this rank answers for; every rank calls it."""
    found = []
    for stage, module in sorted(runtime.stages.items()):
        # Two stages of a rank may have copies of one tensor.
        weights = model_tensors({stage: module}, runtime.stepped)
        states = optimizer_tensors({stage: module}, runtime.optimizers, runtime.stepped)
        whole = join_shares({stage: module}, weights | states)
        found.append({name: value.clone() for name, value in whole.items()})
    return together(found)


def advance(runtime: RankRuntime, config: ModelConfig, plan: Plan) -> tuple[float, Tensors]:
    loss = runtime.step(STEPS, batch_of(config, plan, STEPS)).loss
    return loss, state_of(runtime)


def save(
    rank: int, ranks: int, config: ModelConfig, plan: Plan, directory: Path
) -> tuple[Tensors, tuple[float, Tensors]]:
    """Save after some steps; what was saved, and what one more step gives."""
    runtime = runtime_of(rank, config, plan)
    for step in range(STEPS):
        runtime.step(step, batch_of(config, plan, step))
    save_checkpoint(directory, STATE, runtime.stages, runtime.optimizers, runtime.stepped, keep=1)
    saved = state_of(runtime)
    outcome = advance(runtime, config, plan)
    runtime.close()
    return saved, outcome


def restore(
    rank: int, ranks: int, config: ModelConfig, plan: Plan, directory: Path
) -> tuple[Tensors, tuple[float, Tensors]]:
    runtime = runtime_of(rank, config, plan)
    path, _ = checkpoints.agree_on_newest(directory)
    assert path is not None
    state = checkpoints.load(path, runtime.stages, runtime.optimizers, runtime.stepped)
    assert state == STATE
    restored = state_of(runtime)
    outcome = advance(runtime, config, plan)
    runtime.close()
    return restored, outcome


def together(parts: list[Tensors]) -> Tensors:
    """One tensor per name; ranks that name the same hold the same."""
    whole: Tensors = {}
    for part in parts:
        for name, value in part.items():
            assert torch.equal(whole.setdefault(name, value), value), name
    return whole


def require_same(found: Tensors, expected: Tensors) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("config", "of_model", "source"), ALL_PLANS, ids=[name for *_, name in ALL_PLANS])
def test_every_plan_restores_what_another_saved(
    worker_pool: WorkerPool, tmp_path: Path, config: ModelConfig, of_model: dict[str, Plan], source: str
) -> None:
    plan = of_model[source]
    answers = worker_pool.run(save, config, plan, tmp_path / "checkpoints", ranks=plan.ranks)
    saved = together([tensors for tensors, _ in answers])
    # Three states for each of the model's parameters.
    assert len(saved) == 4 * sum("/" not in name for name in saved)
    after = together([tensors for _, (_, tensors) in answers])
    # Of every two plans, at least one restores what the other saved; and every plan what it saved itself.
    plans = list(of_model.values()) * 2
    place = plans.index(plan)
    for other in plans[place : place + 2]:
        found = worker_pool.run(restore, config, other, tmp_path / "checkpoints", ranks=other.ranks)
        require_same(together([tensors for tensors, _ in found]), saved)
        orders = [(set(one.replicas), set(one.replica_degrees)) for one in (other, plan)]
        if orders[0] == orders[1] and other.precision == plan.precision:
            require_same(together([tensors for _, (_, tensors) in found]), after)
            assert [loss for _, (loss, _) in found] == [answers[0][1][0]] * other.ranks


@pytest.mark.parametrize("source", ["one process", "shares in 16 bits"])
def test_a_wider_precision_restores_the_same_numbers(
    worker_pool: WorkerPool, tmp_path: Path, source: str
) -> None:
    plan, wide = PLANS[source], plan_of("zero-1", precision="fp64")
    answers = worker_pool.run(save, CONFIG, plan, tmp_path / "checkpoints", ranks=plan.ranks)
    found = worker_pool.run(restore, CONFIG, wide, tmp_path / "checkpoints", ranks=wide.ranks)
    saved = together([tensors for tensors, _ in answers])
    # AdamW's count of steps has a type of its own.
    widened = {name: value.double() if value.ndim else value for name, value in saved.items()}
    require_same(together([tensors for tensors, _ in found]), widened)
