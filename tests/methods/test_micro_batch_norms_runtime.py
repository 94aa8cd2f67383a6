"""Law: the norms of micro-batches are those that one process finds of each alone, and change no weight."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from asked_methods import TELLS_NORMS
from context_jobs import TokenLoss, context_plan
from pool import WorkerPool
from small_jobs import SEED, descent, make_program, make_runtime, parameters_of
from tensor_jobs import divisible, samples_of, whole_loss

from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.program.verify import require_valid
from weft.run.stages import build_stage

pytestmark = pytest.mark.processes

STEPS = 2
Norms = list[list[float]]


@dataclass(frozen=True)
class Case:
    """A plan whose norms are told."""

    schedule: str = "1f1b"
    pp: int = 1
    dp: int = 1
    loops: int = 1
    tp: int = 1
    cp: int = 1
    recompute: str = "none"
    sharding: str = "zero-0"
    tied: bool = False
    precision: str = "fp64"
    told: bool = True

    def __str__(self) -> str:
        mesh = f"pp {self.pp} dp {self.dp} tp {self.tp} cp {self.cp}"
        return f"{mesh}, {self.schedule} x {self.loops}, {self.sharding}, recompute {self.recompute}"

    @property
    def model(self) -> ModelConfig:
        return replace(divisible("gpt", sequence=8, tied=self.tied), layers=4)

    @property
    def plan(self) -> Plan:
        plan = context_plan(
            self.model,
            cp=self.cp,
            tp=self.tp,
            pp=self.pp,
            dp=self.dp,
            loops=self.loops,
            schedule=self.schedule,
            recompute=self.recompute,
            sharding=self.sharding,
            precision=self.precision,
        )
        return plan.model_copy(update={"methods": TELLS_NORMS}) if self.told else plan


def train(rank: int, ranks: int, case: Case) -> tuple[Norms, dict[str, torch.Tensor]]:
    plan, config = case.plan, case.model
    runtime = make_runtime(rank, config, plan, make_program(config, plan), loss_fn=TokenLoss())
    results = [runtime.step(step, samples_of(config, plan, step)) for step in range(STEPS)]
    norms = [result.series.get("micro_batch_norms", []) for result in results]
    runtime.gather_weights()
    parameters = parameters_of(runtime)
    runtime.close()
    assert not any(one._backward_hooks for module in runtime.stages.values() for one in module.parameters())
    return norms, parameters


def alone(case: Case) -> Norms:
    """One process that goes back through each micro-batch by itself, and steps with the mean."""
    plan, config = case.plan, case.model
    model = build_stage(config, range(config.layers + 2), SEED, torch.float64)
    optimizer, found = descent(model), []
    for step in range(STEPS):
        batch, gradients = samples_of(config, plan, step), []
        for number in range(plan.micro_batches):
            inputs, targets = batch(number)
            own = torch.autograd.grad(whole_loss(model(inputs), targets), list(model.parameters()))
            gradients.append(own)
        found.append([torch.cat([one.flatten() for one in own]).norm().item() for own in gradients])
        for parameter, *parts in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = sum(parts) / len(parts)
        optimizer.step()
    return found


CASES = (
    Case(tied=True),
    Case(pp=2, dp=2, sharding="zero-3"),
    Case("gpipe", pp=2, recompute="full"),
    Case("breadth-first", pp=2, dp=2, loops=2, recompute="selective", sharding="zero-1"),
    Case("zb-h1", pp=2, recompute="full"),
    Case("chimera", pp=2),
    Case("zb-h1", pp=2, tp=2),
    Case("zb-h1", pp=2, cp=2, recompute="selective"),
    Case(cp=2, tp=2, tied=True),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_norms_are_those_of_one_process(worker_pool: WorkerPool, case: Case) -> None:
    require_valid(make_program(case.model, case.plan))
    expected = alone(case)
    for norms, _ in worker_pool.run(train, case, ranks=case.plan.ranks):
        for found, wanted in zip(norms, expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    "case", [Case(pp=2, dp=2, precision="fp32"), Case("zb-h1", pp=2, precision="bf16")], ids=str
)
def test_no_bit_of_a_weight_changes(worker_pool: WorkerPool, case: Case) -> None:
    told = worker_pool.run(train, case, ranks=case.plan.ranks)
    plain = worker_pool.run(train, replace(case, told=False), ranks=case.plan.ranks)
    for (norms, found), (nothing, expected) in zip(told, plain, strict=True):
        assert nothing == [[]] * STEPS
        assert all(len(step) == case.plan.micro_batches and min(step) > 0.0 for step in norms)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
