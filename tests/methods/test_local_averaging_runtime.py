"""Law: a run of replicas that step by themselves, stopped inside a cycle, goes on to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pool import WorkerPool
from safetensors.torch import load_file
from saved_checkpoints import save_checkpoint
from small_jobs import SEED, batch_of, make_runtime, parameters_of
from small_plans import make_plan, make_program, tiny
from stopped_runs import text_run, through_and_stopped

from weft.describe.model import ModelConfig
from weft.describe.plan import Choice, Plan
from weft.training.checkpoint import checkpoints
from weft.training.checkpoint.tensor_shares import join_shares
from weft.training.checkpoint.training_state import TrainingState
from weft.training.optimizer.optimizers import OptimizerSettings, optimizer_factory

pytestmark = pytest.mark.processes

STEPS = 6
ADAMW = OptimizerSettings(
    name="adamw", learning_rate=0.05, warm_up_steps=0, betas=(0.9, 0.95), weight_decay=0.2
)
Outcome = tuple[list[float], dict[str, torch.Tensor]]


def averaged(plan: Plan, every: int, method: str, **options: float | str) -> Plan:
    sync = Choice(name=method, options={"every": every, **options})
    return plan.model_copy(update={"sync": sync})


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
            settled = join_shares(runtime.stages, parameters_of(runtime))
        assert all(torch.equal(value, own[name]) for name, value in parameters_of(runtime).items())
        if end == done:
            save_checkpoint(folder, state, *parts, keep=1)
            saved = load_tensors(folder / f"step-{done:08}")
            assert all(torch.equal(saved[name].to(value.dtype), value) for name, value in settled.items())
        runtime.close()
        outcomes.append((losses, own))
    return outcomes


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("pp", "precision", "method", "options"),
    [
        (1, "bf16", "diloco", {}),
        (2, "fp32", "slow-momentum", {}),
        (2, "bf16", "sign-momentum", {}),
        (1, "fp32", "sign-momentum", {"sign": "random", "download": "weights"}),
        (1, "fp32", "diloco", {"replica_steps": "3 2"}),
    ],
)
def test_a_run_resumed_inside_a_cycle_goes_on_to_the_bit(
    worker_pool: WorkerPool, tmp_path: Path, pp: int, precision: str, method: str, options: dict[str, str]
) -> None:
    config = tiny(layers=2, tied=True)
    plan = averaged(make_plan(config, pp=pp, dp=2, precision=precision), 3, method, **options)
    replicas = worker_pool.run(resume, config, plan, tmp_path, 4, ranks=plan.ranks)
    for (losses, whole), (first, _), (second, resumed) in replicas:
        assert first + second == losses
        assert all(torch.equal(value, whole[name]) for name, value in resumed.items())
    one, other = replicas[0][1][1], replicas[pp][1][1]
    assert any(not torch.equal(value, other[name]) for name, value in one.items()), "replicas differ"


OWN_STEPS = """
[goal]
contract = "empirical"
[sync]
method = "local-averaging"
every = 3
replica_steps = "3 2"
"""


def test_a_replica_that_rests_draws_no_samples_also_in_a_run_that_is_stopped(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    run_file = text_run(tmp_path, OWN_STEPS, steps=6).replace("pp = 2\ndp = 1", "pp = 1\ndp = 2")
    through, stopped = through_and_stopped(worker_pool, tmp_path, run_file, steps=6, stop=4)
    for directory in (through, stopped):
        state = json.loads((directory / "checkpoints" / "step-00000006" / "state.json").read_text())
        # Of three steps with two samples of each replica, one replica leaves out the first.
        assert state["samples"] == 2 * (3 * 4 - 2)
    rows = [
        {row["step"]: row for row in map(json.loads, (one / "metrics.jsonl").read_text().splitlines())}
        for one in (through, stopped)
    ]
    assert [row["loss"] for row in rows[0].values()] == [row["loss"] for row in rows[1].values()]
    tokens = [row["tokens_per_s"] * row["step_s"] / 16 for row in rows[0].values()]
    assert tokens == pytest.approx([2, 4, 4] * 2)
