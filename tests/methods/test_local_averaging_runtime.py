"""Law: replicas that step by themselves train like one process that steps each of them in turn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pool import WorkerPool
from safetensors.torch import load_file
from small_jobs import (
    SEED,
    batch_of,
    descent,
    loss_of,
    make_plan,
    make_program,
    make_runtime,
    parameters_of,
    tiny,
    train_alone,
)
from torch import nn

from weft.describe.model import ModelConfig
from weft.describe.plan import Choice, Plan
from weft.program.verify import require_valid
from weft.run.stages import build_stage
from weft.training import checkpoints
from weft.training.optimizers import OptimizerSettings, optimizer_factory
from weft.training.training_state import TrainingState

pytestmark = pytest.mark.processes

STEPS = 6
ADAMW = OptimizerSettings(
    name="adamw", learning_rate=0.05, warm_up_steps=0, betas=(0.9, 0.95), weight_decay=0.2
)
Outcome = tuple[list[float], dict[str, torch.Tensor]]


def averaged(plan: Plan, every: int, **options: float) -> Plan:
    sync = Choice(name="local-averaging", options={"every": every, **options})
    return plan.model_copy(update={"sync": sync})


def train(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> Outcome:
    runtime = make_runtime(rank, config, plan, make_program(config, plan))
    losses = [runtime.step(step, batch_of(config, plan, step)).loss for step in range(STEPS)]
    runtime.gather_weights()
    parameters = parameters_of(runtime)
    runtime.close()
    return losses, parameters


def alone(config: ModelConfig, plan: Plan, every: int, outer_momentum: float = 0.0) -> Outcome:
    """One process with a model for every replica; averages count as many micro-batches as a replica runs.

    What the average has moved is the gradient of a step of torch's own Nesterov.
    """
    shares = [copy.micro_batches for copy in plan.stages[0].replicas]
    models = [build_stage(config, range(config.layers + 2), SEED, torch.float64) for _ in shares]
    optimizers = [descent(model) for model in models]
    whole = [nn.Parameter(one.detach().clone()) for one in models[0].parameters()]
    outer = torch.optim.SGD(whole, lr=1.0, momentum=outer_momentum, nesterov=outer_momentum > 0.0)
    losses = []
    for step in range(STEPS):
        batch, total, first = batch_of(config, plan, step), 0.0, 0
        for model, optimizer, share in zip(models, optimizers, shares, strict=True):
            for number in range(first, first + share):
                inputs, targets = batch(number)
                loss = loss_of(model(inputs), targets)
                (loss / share).backward()
                total += loss.item() / sum(shares)
            first += share
            optimizer.step()
            optimizer.zero_grad()
        losses.append(total)
        if (step + 1) % every == 0:
            with torch.no_grad():
                copies = list(zip(*(model.parameters() for model in models), strict=True))
                for one, same in zip(whole, copies, strict=True):
                    mean = sum(copy * share / sum(shares) for copy, share in zip(same, shares, strict=True))
                    one.grad = one - mean
                outer.step()
                for one, same in zip(whole, copies, strict=True):
                    for copy in same:
                        copy.copy_(one)
    return losses, {name: value.detach().clone() for name, value in models[0].named_parameters()}


def require_equal(found: list[Outcome], expected: Outcome) -> None:
    for losses, parameters in found:
        assert losses == pytest.approx(expected[0], rel=1e-9)
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[1][name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("schedule", "pp", "loops", "every", "tied", "outer_momentum"),
    [
        ("gpipe", 1, 1, 1, False, 0.0),
        ("gpipe", 1, 1, 2, True, 0.9),
        ("1f1b", 2, 1, 3, True, 0.0),
        ("breadth-first", 2, 2, 2, False, 0.9),
    ],
)
def test_replicas_train_like_one_process_that_steps_each(
    worker_pool: WorkerPool,
    schedule: str,
    pp: int,
    loops: int,
    every: int,
    tied: bool,
    outer_momentum: float,
) -> None:
    config = tiny(layers=2, tied=tied)
    plain = make_plan(config, pp=pp, dp=2, loops=loops, schedule=schedule)
    plan = averaged(plain, every, outer_momentum=outer_momentum)
    program = make_program(config, plan)
    require_valid(program)
    assert program.steps_per_cycle == every
    found = worker_pool.run(train, config, plan, ranks=plan.ranks)
    require_equal(found, alone(config, plan, every, outer_momentum))


def resume(rank: int, ranks: int, config: ModelConfig, plan: Plan, folder: Path, done: int) -> list[Outcome]:
    """Trained in one go, and stopped after so many steps and resumed; and what the checkpoint stands for."""
    state = TrainingState(
        step=done, plan_id=plan.plan_id, seed=SEED, samples=0, model="", precision="", data="", first_loss=0.0
    )
    outcomes, program = [], make_program(config, plan)
    for start, end in ((0, STEPS), (0, done), (done, STEPS)):
        runtime = make_runtime(
            rank, config, plan, program, optimizer_factory=optimizer_factory(ADAMW), generation=len(outcomes)
        )
        parts = runtime.stages, runtime.optimizers, runtime.stepped, runtime.methods
        if start:
            path = folder / f"step-{done:08}"
            checkpoints.load(path, *parts, plan_ids={plan.plan_id})
        losses = [runtime.step(step, batch_of(config, plan, step)).loss for step in range(start, end)]
        runtime.gather_weights()
        own = parameters_of(runtime)
        with runtime.settled():
            settled = parameters_of(runtime)
        assert all(torch.equal(value, own[name]) for name, value in parameters_of(runtime).items())
        if end == done:
            checkpoints.save(folder, state, *parts, keep=1)
            saved = load_tensors(folder / f"step-{done:08}")
            assert all(torch.equal(saved[name].to(value.dtype), value) for name, value in settled.items())
        runtime.close()
        outcomes.append((losses, own))
    return outcomes


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("pp", "precision"), [(1, "bf16"), (2, "fp32")])
def test_a_run_resumed_inside_a_cycle_goes_on_to_the_bit(
    worker_pool: WorkerPool, tmp_path: Path, pp: int, precision: str
) -> None:
    config = tiny(layers=2, tied=True)
    plan = averaged(make_plan(config, pp=pp, dp=2, precision=precision), 3, outer_momentum=0.9)
    replicas = worker_pool.run(resume, config, plan, tmp_path, 4, ranks=plan.ranks)
    for (losses, whole), (first, _), (second, resumed) in replicas:
        assert first + second == losses
        assert all(torch.equal(value, whole[name]) for name, value in resumed.items())
    one, other = replicas[0][1][1], replicas[pp][1][1]
    assert any(not torch.equal(value, other[name]) for name, value in one.items()), "replicas differ"


def test_averaging_every_step_of_plain_descent_is_dense_training(worker_pool: WorkerPool) -> None:
    config = tiny(layers=2)
    plan = make_plan(config, dp=2)
    expected = train_alone(config, plan, STEPS)
    require_equal(worker_pool.run(train, config, averaged(plan, 1), ranks=2), expected)
