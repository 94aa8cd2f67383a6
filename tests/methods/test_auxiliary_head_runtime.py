"""Law: a plan with an auxiliary head trains like one process that adds its weighted loss to the model's."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from asked_methods import CLIPS, TELLS_NORMS, with_head
from pool import WorkerPool
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
)

from weft.describe.model import ModelConfig
from weft.describe.plan import Choice, Plan
from weft.program.verify import require_valid
from weft.run.stages import build_stage

pytestmark = pytest.mark.processes

STEPS = 2
WEIGHT = 0.3
CLIP_NORM = 0.3
Outcome = tuple[list[float], list[float], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """A plan with a head; `after` are the blocks before it, of four."""

    after: int
    schedule: str = "1f1b"
    pp: int = 2
    dp: int = 1
    loops: int = 1
    recompute: str = "none"
    sharding: str = "zero-0"
    family: str = "gpt"
    clips: bool = False
    told: bool = False
    tied: bool = False

    @property
    def config(self) -> ModelConfig:
        return tiny(self.family, layers=4, tied=self.tied)

    @property
    def plan(self) -> Plan:
        plan = make_plan(self.config, pp=self.pp, dp=self.dp, loops=self.loops, schedule=self.schedule)
        stages = tuple(stage.model_copy(update={"recompute": self.recompute}) for stage in plan.stages)
        methods = (with_head(self.after, WEIGHT), *(CLIPS if self.clips else ()))
        methods += TELLS_NORMS if self.told else ()
        return plan.model_copy(update={"stages": stages, "methods": methods, "sharding": self.sharding})


def train(rank: int, ranks: int, case: Case) -> Outcome:
    plan, config = case.plan, case.config
    clip_norm = CLIP_NORM if case.clips else None
    runtime = make_runtime(rank, config, plan, make_program(config, plan), clip_norm=clip_norm)
    results = [runtime.step(step, batch_of(config, plan, step)) for step in range(STEPS)]
    losses = [(one.loss, one.totals["auxiliary_loss"]) for one in results]
    runtime.gather_weights()
    parameters = parameters_of(runtime)
    held = [name for name in parameters if name.startswith("auxiliary_head.")]
    assert bool(held) == any(case.after in plan.stages[stage].layers for stage in runtime.stages)
    assert not any(key[0] == "auxiliary_loss" for key in runtime._training._workspace.values)
    runtime.close()
    return [one for one, _ in losses], [one for _, one in losses], parameters


def alone(case: Case) -> Outcome:
    """One process whose layers are called one after the other, the head behind its block."""
    plan, config = case.plan, case.config
    model = build_stage(config, range(6), SEED, torch.float64, methods=plan.methods)
    optimizer, losses, auxiliary = descent(model), [], []
    for step in range(STEPS):
        batch, total, beside = batch_of(config, plan, step), 0.0, 0.0
        for number in range(plan.micro_batches):
            value, targets = batch(number)
            for layer, function in enumerate(model.layer_functions(value)):
                value = function(value)
                if layer == case.after:
                    logits = model.auxiliary_head(value)
            own = loss_of(value, targets) / plan.micro_batches
            other = loss_of(logits, targets) / plan.micro_batches
            (own + WEIGHT * other).backward()
            total, beside = total + own.item(), beside + other.item()
        losses.append(total)
        auxiliary.append(beside)
        if case.clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return losses, auxiliary, {name: one.detach().clone() for name, one in model.named_parameters()}


# Two stages have blocks 1 and 2, 3 and 4; four have none, 1 and 2, 3, 4.
CASES = (
    Case(1, recompute="full", clips=True),
    Case(4, "zb-h1", recompute="full", tied=True),
    Case(2, "zb-v", loops=2, recompute="selective", told=True),
    Case(3, "breadth-first", loops=2, recompute="selective"),
    Case(2, "breadth-first", loops=2, sharding="zero-3", pp=1, dp=2),
    Case(3, "chimera", family="llama"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_head_trains_as_in_one_process(worker_pool: WorkerPool, case: Case) -> None:
    require_valid(make_program(case.config, case.plan))
    losses, auxiliary, expected = alone(case)
    found = worker_pool.run(train, case, ranks=case.plan.ranks)
    assert {name for _, _, own in found for name in own} == set(expected)
    for own_losses, own_auxiliary, parameters in found:
        assert own_losses == pytest.approx(losses, rel=1e-9)
        assert own_auxiliary == pytest.approx(auxiliary, rel=1e-9)
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)


def test_replicas_that_step_by_themselves_weigh_their_own_head(worker_pool: WorkerPool) -> None:
    """With plain descent and an averaging after every step, nothing is different from one process."""
    case = Averaged(1, pp=1, dp=2)
    losses, _, expected = alone(case)
    for own_losses, _, parameters in worker_pool.run(train, case, ranks=2):
        assert own_losses == pytest.approx(losses, rel=1e-9)
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)


class Averaged(Case):
    @property
    def plan(self) -> Plan:
        sync = Choice(name="local-averaging", options={"every": 1})
        return super().plan.model_copy(update={"sync": sync})
