"""Law: all ranks clip by the norm that one process would find, or all leave the step out."""

from __future__ import annotations

import math

import pytest
import torch
from asked_methods import CLIPS
from pool import RankError, WorkerPool
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
from weft.describe.plan import Plan
from weft.errors import InputError
from weft.methods.gradient_norm.runtime import GradientNorm
from weft.program.verify import require_valid
from weft.run.methods import OwnGradient
from weft.run.stages import build_stage

pytestmark = pytest.mark.processes

STEPS = 3
CLIP_NORM = 0.4
BROKEN_STEP = 1
Outcome = tuple[list[float | None], dict[str, torch.Tensor]]


def with_norm(plan: Plan, sharding: str = "zero-0") -> Plan:
    return plan.model_copy(update={"methods": CLIPS, "sharding": sharding})


def train(rank: int, ranks: int, config: ModelConfig, plan: Plan, clip_norm: float | None) -> Outcome:
    runtime = make_runtime(rank, config, plan, make_program(config, plan), clip_norm=clip_norm)
    norms = [runtime.step(step, batch_of(config, plan, step)).gradient_norm for step in range(STEPS)]
    runtime.gather_weights()
    parameters = parameters_of(runtime)
    runtime.close()
    return norms, parameters


def alone(rank: int, ranks: int, config: ModelConfig, plan: Plan, clip_norm: float) -> Outcome:
    """What torch's own clipping does in one process."""
    model = build_stage(config, range(config.layers + 2), SEED, torch.float64)
    optimizer, norms = descent(model), []
    for step in range(STEPS):
        for number in range(plan.micro_batches):
            inputs, targets = batch_of(config, plan, step)(number)
            (loss_of(model(inputs), targets) / plan.micro_batches).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize(
    ("schedule", "pp", "dp", "loops", "sharding", "tied"),
    [
        ("gpipe", 1, 1, 1, "zero-0", False),
        ("gpipe", 1, 3, 1, "zero-0", True),
        ("1f1b", 2, 2, 1, "zero-0", True),
        ("1f1b", 2, 2, 1, "zero-1", True),
        ("breadth-first", 2, 1, 2, "zero-0", True),
        ("breadth-first", 2, 2, 3, "zero-2", False),
        ("depth-first", 2, 2, 2, "zero-2", True),
        ("zb-v", 2, 2, 2, "zero-1", False),
        ("chimera", 2, 1, 1, "zero-1", True),
    ],
)
def test_clipping_is_that_of_one_process(
    worker_pool: WorkerPool, schedule: str, pp: int, dp: int, loops: int, sharding: str, tied: bool
) -> None:
    config = tiny(tied=tied)
    plan = with_norm(make_plan(config, pp=pp, dp=dp, loops=loops, schedule=schedule), sharding)
    require_valid(make_program(config, plan))
    [(expected_norms, expected)] = worker_pool.run(alone, config, plan, CLIP_NORM, ranks=1)
    assert max(expected_norms) > CLIP_NORM
    for norms, parameters in worker_pool.run(train, config, plan, CLIP_NORM, ranks=plan.ranks):
        assert norms == pytest.approx(expected_norms, rel=1e-9)
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


def test_a_norm_within_the_limit_changes_no_bit(worker_pool: WorkerPool) -> None:
    config = tiny()
    plan = make_plan(config, pp=2, dp=2, schedule="1f1b", precision="fp32")
    plain = worker_pool.run(train, config, plan, None, ranks=4)
    watched = worker_pool.run(train, config, with_norm(plan), 1e6, ranks=4)
    for (nothing, expected), (norms, found) in zip(plain, watched, strict=True):
        assert nothing == [None] * STEPS
        assert all(norm is not None and 0.0 < norm < 1e6 for norm in norms)
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
