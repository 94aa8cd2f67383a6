"""Law: replicas that share out in islands train like one process, and in one island to the bits of none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from asked_methods import CLIPS
from pool import WorkerPool
from small_jobs import SEED, batch_of, descent, loss_of, make_plan, make_program, make_runtime, tiny

from weft.describe.plan import Plan, Sharding
from weft.methods.sharding.kinds import REDUCE, REDUCE_ACROSS
from weft.program.rank_program import part_of
from weft.program.verify import require_valid
from weft.run.runtime import RankRuntime
from weft.run.stages import build_stage
from weft.training import checkpoints
from weft.training.optimizer_states import optimizer_tensors
from weft.training.optimizers import OptimizerSettings, optimizer_factory
from weft.training.training_state import TrainingState
from weft.training.weight_tensors import model_tensors

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
Outcome = tuple[list[float], list[float | None], Tensors]


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


def train(rank: int, ranks: int, plans: list[Plan]) -> list[Outcome]:
    """Losses, norms and parameters by plan."""
    found = []
    for generation, plan in enumerate(plans):
        clip_norm = CLIP_NORM if plan.methods else None
        program = make_program(CONFIG, plan)
        runtime = make_runtime(rank, CONFIG, plan, program, clip_norm=clip_norm, generation=generation)
        results = [runtime.step(step, batch_of(CONFIG, plan, step)) for step in range(STEPS)]
        losses = [result.loss for result in results]
        found.append((losses, [result.gradient_norm for result in results], state_of(runtime)))
        runtime.close()
    return found


def alone(rank: int, ranks: int, plan: Plan) -> Outcome:
    """One process that accumulates the micro-batches in their order."""
    model = build_stage(CONFIG, range(CONFIG.layers + 2), SEED, torch.float64)
    optimizer, losses, norms = descent(model), [], []
    for step in range(STEPS):
        batch, total = batch_of(CONFIG, plan, step), 0.0
        for number in range(plan.micro_batches):
            inputs, targets = batch(number)
            loss = loss_of(model(inputs), targets) / plan.micro_batches
            loss.backward()
            total += loss.item()
        losses.append(total)
        if plan.methods:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: value.detach().clone() for name, value in model.named_parameters()}


def test_islands_train_like_one_process(worker_pool: WorkerPool) -> None:
    """Every level, several orders, with and without clipping; depth-first reduces a gradient in parts."""
    plans = [
        plan_of("zero-1"),
        plan_of("zero-2", loops=3, schedule="breadth-first", clips=True),
        plan_of("zero-3", loops=4, schedule="depth-first"),
        plan_of("zero-3", pp=2, dp=2, schedule="chimera", micro_batches=4),
        plan_of("zero-1", pp=2, dp=2, schedule="chimera", micro_batches=4, clips=True),
    ]
    for plan in plans:
        program = make_program(CONFIG, plan)
        require_valid(program)
        assert REDUCE_ACROSS in program.columns.kind
    columns = make_program(CONFIG, plans[2]).columns
    assert columns.part[columns.kind == REDUCE].max() > 0
    references = {
        bool(plan.methods): worker_pool.run(alone, plan, ranks=1)[0] for plan in reversed(plans[:2])
    }
    assert max(references[True][1]) > CLIP_NORM
    answers = worker_pool.run(train, plans, ranks=4)
    for number, plan in enumerate(plans):
        expected_losses, expected_norms, expected = references[bool(plan.methods)]
        for losses, norms, _ in (answer[number] for answer in answers):
            assert losses == pytest.approx(expected_losses, rel=1e-9)
            assert norms == (pytest.approx(expected_norms, rel=1e-9) if expected_norms else [None] * STEPS)
        found = together([answer[number][2] for answer in answers])
        assert set(found) == set(expected)
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_level_trains_to_the_same_bits(worker_pool: WorkerPool, precision: str) -> None:
    sizes = {"loops": 3, "schedule": "breadth-first", "precision": precision}
    plans = [plan_of(sharding, **sizes) for sharding in SHARDINGS]
    plans += [plan_of("zero-3", island, **sizes) for island in (None, 4)]
    answers = worker_pool.run(train, plans, ranks=4)
    outcomes = [
        (answers[0][number][0], together([answer[number][2] for answer in answers]))
        for number in range(len(plans))
    ]
    for first, second in ((0, 1), (0, 2), (3, 4)):
        assert outcomes[first][0] == outcomes[second][0]
        for name, value in outcomes[first][1].items():
            assert torch.equal(outcomes[second][1][name], value), name
    assert outcomes[0][0] == pytest.approx(outcomes[3][0], rel=1e-2 if precision == "bf16" else 1e-5)


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
    checkpoints.save(directory, STATE, runtime.stages, runtime.optimizers, runtime.stepped, keep=1)
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
