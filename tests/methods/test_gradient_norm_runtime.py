"""Law: a norm within the limit changes nothing, and all ranks leave out a step that is not finite."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from asked_methods import CLIPS
from equality_table import Row, train
from methods.rows.gradient_norm import Clips
from pool import RankError, WorkerPool
from small_jobs import batch_of, loss_of, make_runtime, parameters_of
from small_plans import make_plan, make_program, tiny

from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.errors import InputError
from weft.methods.gradient_norm.runtime import GradientNorm
from weft.run.methods import OwnGradient

pytestmark = pytest.mark.processes

STEPS = 3
BROKEN_STEP = 1


def with_norm(plan: Plan, sharding: str = "zero-0") -> Plan:
    return plan.model_copy(update={"methods": CLIPS, "sharding": sharding})


def test_a_norm_within_the_limit_changes_no_bit(worker_pool: WorkerPool) -> None:
    row = Row(tiny(), "1f1b", pp=2, dp=2, precision="fp32", steps=STEPS)
    watching = replace(row, methods=(Clips(1e6),))
    plain, watched = (worker_pool.run(train, one, one.plan, ranks=4) for one in (row, watching))
    for (nothing, expected), (steps, found) in zip(plain, watched, strict=True):
        assert not any("gradient_norm" in step for step in nothing)
        assert all(0.0 < step["gradient_norm"][0] < 1e6 for step in steps)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def break_a_step(
    rank: int, ranks: int, config: ModelConfig, plan: Plan, skips: bool
) -> tuple[list[bool], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Which steps were left out when one micro-batch of one step overflows, the parameters, and what they
    would be without that step."""
    steps = [step for step in range(STEPS) if step != BROKEN_STEP]
    calls = 0

    def overflowing(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        own = plan.stages[-1].replicas[0].micro_batches
        broken = calls == BROKEN_STEP * own + 1 and rank == ranks - 1
        return loss_of(logits, targets) * (math.inf if broken else 1.0)

    broken = make_runtime(
        rank, config, plan, make_program(config, plan), loss_fn=overflowing, skip_non_finite=skips
    )
    results = [broken.step(step, batch_of(config, plan, step)) for step in range(STEPS)]
    broken.gather_weights()
    found = parameters_of(broken)
    broken.close()
    whole = make_runtime(rank, config, plan, make_program(config, plan), generation=1)
    for step in steps:
        whole.step(step, batch_of(config, plan, step))
    whole.gather_weights()
    expected = parameters_of(whole)
    whole.close()
    return [result.left_out for result in results], found, expected


@pytest.mark.parametrize("sharding", ["zero-0", "zero-2"])
def test_a_step_that_is_not_finite_is_left_out_by_all(worker_pool: WorkerPool, sharding: str) -> None:
    config = tiny()
    plan = with_norm(make_plan(config, pp=2, dp=2, schedule="1f1b", precision="fp32"), sharding)
    for left_out, found, expected in worker_pool.run(break_a_step, config, plan, True, ranks=4):
        assert left_out == [step == BROKEN_STEP for step in range(STEPS)]
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_step_that_is_not_finite_fails_where_it_is_not_left_out(worker_pool: WorkerPool) -> None:
    config = tiny()
    plan = with_norm(make_plan(config, pp=2, schedule="1f1b"))
    with pytest.raises(RankError, match=r"step 1, instruction .*: the norm of the gradient is (inf|nan)"):
        worker_pool.run(break_a_step, config, plan, False, ranks=2)


def refuse(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> str:
    with pytest.raises(InputError) as refused:
        make_runtime(rank, config, plan, make_program(config, plan), clip_norm=1.0)
    return str(refused.value)


def test_clipping_needs_a_plan_that_takes_the_norm(worker_pool: WorkerPool) -> None:
    config = tiny()
    [line] = worker_pool.run(refuse, config, make_plan(config), ranks=1)
    assert line == (
        "runtime: clip_norm and skip_non_finite need a plan with the method (nearest valid: gradient-norm)"
    )


def test_each_stage_is_scaled_once() -> None:
    gradients = [torch.ones(4), torch.ones(4)]
    own = {stage: OwnGradient((flat,), (flat,)) for stage, flat in enumerate(gradients)}
    norm = GradientNorm(clip_norm=1.0, skip_non_finite=False, gradients=own)
    assert norm.clip(0, 4.0)
    assert gradients[0][0].item() == pytest.approx(0.25, rel=1e-6)
    assert gradients[1][0].item() == 1.0
