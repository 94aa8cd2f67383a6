"""Law: a norm within the limit changes nothing, and all ranks leave out a step that is not finite."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import convolutional_jobs
import pytest
import torch
from asked_methods import CLIPS
from convolutional_jobs import images_of
from equality_jobs import OPTIMIZERS
from equality_table import Row, train
from methods.rows.auxiliary_head import Head
from methods.rows.gradient_norm import Clips
from methods.rows.tensor_collectives import OVERLAPPED
from one_process import Outcome
from pool import RankError, WorkerPool
from small_jobs import batch_of, descent, loss_of, make_runtime, parameters_of
from small_plans import divisible, make_plan, make_program, tiny
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from weft.describe.model import ModelConfig
from weft.describe.optimizers import ADAMW, KNOWN_OPTIMIZERS
from weft.describe.plan import Plan
from weft.errors import InputError, RunError
from weft.methods.gradient_norm.program import NAME
from weft.methods.gradient_norm.runtime import GradientNorm
from weft.run.methods import OwnGradient
from weft.run.state.loss_scale import INITIAL, LEAST, LossScale
from weft.run.workspace import Workspace

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


SCALED_ROWS = (
    Row(tiny(), "1f1b", pp=2, dp=2, methods=(Clips(),), steps=STEPS),
    Row(tiny(tied=True), "zb-h1", pp=2, methods=(Clips(0.2),), steps=STEPS),
    Row(tiny(), "breadth-first", dp=2, loops=2, sharding="zero-2", methods=(Clips(None),), steps=STEPS),
    Row(tiny(), "1f1b", pp=2, methods=(Clips(), Head(1)), steps=STEPS),
    Row(divisible("llama"), tp=2, methods=(OVERLAPPED, Clips()), steps=STEPS),
)


def train_scaled(
    rank: int, ranks: int, row: Row, plan: Plan, scaled: tuple[str, ...]
) -> tuple[Outcome, list[float]]:
    """What a rank tells and ends with, and the factors of its losses."""
    factors, begun = [], Workspace.loss_gradient

    def noted(workspace: Workspace, loss: torch.Tensor) -> torch.Tensor | None:
        gradient = begun(workspace, loss)
        factors.append(1.0 if gradient is None else gradient.item())
        return gradient

    with (
        patch("weft.methods.gradient_norm.runtime.SCALED", scaled),
        patch.object(Workspace, "loss_gradient", noted),
    ):
        return train(rank, ranks, row, plan), factors


@pytest.mark.parametrize("row", SCALED_ROWS, ids=str)
def test_a_factor_of_the_losses_changes_no_bit(worker_pool: WorkerPool, row: Row) -> None:
    plan = row.plan
    plain, scaled = (
        worker_pool.run(train_scaled, row, plan, precisions, ranks=plan.ranks)
        for precisions in ((), ("fp64",))
    )
    for outcomes, expected in ((plain, 1.0), (scaled, INITIAL)):
        assert {factor for _, factors in outcomes for factor in factors} == {expected}
    for ((told, tensors), _), ((usual, others), _) in zip(scaled, plain, strict=True):
        assert [one.pop("loss_scale") for one in told] == [[INITIAL]] * len(told)
        assert told == usual
        assert all(torch.equal(tensors[name], others[name]) for name in others)


def adamw(stage: torch.nn.Module, *, fused: bool = True) -> torch.optim.Optimizer:
    """The optimizer of `weft train`, which leaves a step out by itself where it is fused."""
    return torch.optim.AdamW(stage.parameters(), fused=fused)


# The optimizers of the first row leave a step out by themselves.
FACTORIES = {
    "adamw": adamw,
    **{name: OPTIMIZERS[name] for name in ("lamb", "nvlamb", "lans", "muon")},
    "momentum": lambda stage: torch.optim.SGD(stage.parameters(), lr=0.5, momentum=0.9, fused=True),
    "unfused": partial(adamw, fused=False),
    "descent": descent,
}


def stepped_by(plan: Plan, optimizer: str) -> Plan:
    return plan.model_copy(update={"optimizer": KNOWN_OPTIMIZERS.get(optimizer, ADAMW)})


def break_a_step(
    rank: int, ranks: int, config: ModelConfig, plan: Plan, skips: bool, optimizer: str = "descent"
) -> tuple[list[bool], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Which steps were left out when one micro-batch of one step overflows, the parameters, and what they
    would be without that step."""
    steps = [step for step in range(STEPS) if step != BROKEN_STEP]
    calls, options = 0, {"optimizer_factory": FACTORIES[optimizer]}

    def overflowing(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        own = plan.stages[-1].replicas[0].micro_batches
        broken = calls == BROKEN_STEP * own + 1 and rank == ranks - 1
        return loss_of(logits, targets) * (math.inf if broken else 1.0)

    broken = make_runtime(
        rank,
        config,
        plan,
        make_program(config, plan),
        loss_fn=overflowing,
        skip_non_finite=skips,
        **options,
    )
    results = [broken.step(step, batch_of(config, plan, step)) for step in range(STEPS)]
    broken.gather_weights()
    found = parameters_of(broken)
    broken.close()
    whole = make_runtime(rank, config, plan, make_program(config, plan), generation=1, **options)
    for step in steps:
        whole.step(step, batch_of(config, plan, step))
    whole.gather_weights()
    expected = parameters_of(whole)
    whole.close()
    return [result.left_out for result in results], found, expected


@pytest.mark.parametrize(
    ("optimizer", "sharding"),
    [
        *((optimizer, sharding) for optimizer in ("descent", "adamw") for sharding in ("zero-0", "zero-2")),
        ("lamb", "zero-2"),
        ("nvlamb", "zero-0"),
        ("lans", "zero-2"),
        ("muon", "zero-0"),
        ("muon", "zero-2"),
        ("momentum", "zero-0"),
        ("momentum", "zero-2"),
    ],
)
def test_a_step_that_is_not_finite_is_left_out_by_all(
    worker_pool: WorkerPool, sharding: str, optimizer: str
) -> None:
    config = tiny()
    plan = with_norm(make_plan(config, pp=2, dp=2, schedule="1f1b", precision="fp32"), sharding)
    plan = stepped_by(plan, optimizer)
    outcomes = worker_pool.run(break_a_step, config, plan, True, optimizer, ranks=4)
    for left_out, found, expected in outcomes:
        assert left_out == [step == BROKEN_STEP for step in range(STEPS)]
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_step_that_is_not_finite_fails_where_it_is_not_left_out(worker_pool: WorkerPool) -> None:
    config = tiny()
    plan = with_norm(make_plan(config, pp=2, schedule="1f1b"))
    with pytest.raises(RankError, match=r"step 1: the norm of the gradient is (inf|nan)"):
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
    norm.clip(0, torch.tensor(4.0, dtype=torch.float64))
    assert gradients[0][0].item() == pytest.approx(0.25, rel=1e-6)
    assert gradients[1][0].item() == 1.0


def scaled_steps(scale: LossScale, own: OwnGradient, stages: int = 2, **options: Any) -> GradientNorm:
    """The norm of a rank whose stages have such gradients."""
    return GradientNorm(gradients=dict.fromkeys(range(stages), own), scale=scale, **options)


def votes(norm: GradientNorm, scale: LossScale, number: float, stages: int = 2) -> list[float]:
    """What the stages of a rank say to one step with a gradient of this norm."""
    taken = torch.tensor([number], dtype=torch.float64)
    factor, following = scale.factor.clone(), scale.after(taken)
    return [norm.vote(stage, taken, factor, following).item() for stage in range(stages)]


@pytest.mark.parametrize("skips", [False, True])
def test_an_overflow_is_left_out_until_the_factor_cannot_fall(skips: bool) -> None:
    scale, gradient = LossScale(), torch.ones(4)
    own = OwnGradient((gradient,), (gradient,))
    norm = scaled_steps(scale, own, clip_norm=None, skip_non_finite=skips)
    while (factor := scale.factor.item()) > LEAST:
        norm.require({"gradient_norm": math.inf, "loss_scale": factor})
        assert votes(norm, scale, math.inf) == [1.0, 1.0]
        # Once for each step, and not for each of a rank's stages.
        assert scale.factor == factor / 2.0
    with nullcontext() if skips else pytest.raises(RunError, match="the norm of the gradient is inf"):
        norm.require({"gradient_norm": math.inf, "loss_scale": scale.factor.item()})


def test_a_gradient_is_divided_by_the_factor_of_its_losses() -> None:
    scale, gradient = LossScale(), torch.full((4,), INITIAL)
    norm = scaled_steps(scale, OwnGradient((gradient,), (gradient,)), clip_norm=None, skip_non_finite=False)
    assert votes(norm, scale, 2.0, stages=1) == [0.0]
    assert torch.equal(gradient, torch.ones(4))


class NoReads(TorchDispatchMode):
    """Fails where the host reads a number of a tensor, which waits for an accelerator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a number"
        return func(*args, **(kwargs or {}))


def step_without_reads(
    rank: int, ranks: int, config: ModelConfig, plan: Plan, optimizer: str
) -> list[str | bool]:
    """What becomes of a finite step and one that overflows, whose numbers are read afterwards only."""
    scale, draws = torch.ones(()), batch_of if config.family == "gpt" else images_of

    def overflowing(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten()) * scale

    program, factory = make_program(config, plan), FACTORIES[optimizer]
    runtime = make_runtime(
        rank, config, plan, program, loss_fn=overflowing, optimizer_factory=factory, skip_non_finite=True
    )
    told: list[str | bool] = []
    outcomes, read = [], runtime._share
    for step in range(2):
        scale.fill_(math.inf if step else 1.0)
        with patch.object(runtime, "_share", lambda step, outcome: outcome), NoReads():
            try:
                outcomes.append(runtime.step(step, draws(config, plan, step)))
            except RunError as error:
                told.append(str(error))
    for step, outcome in enumerate(outcomes):
        result = read(step, outcome)
        told += [
            result.left_out,
            *(f"loss_scale {one}" for name, one in result.figures.items() if name == "loss_scale"),
        ]
    told += [f"{name} {tensor.tolist()}" for name, tensor in runtime.methods[NAME].tensors().items()]
    runtime.close()
    return told


@pytest.mark.parametrize("sharding", ["zero-0", pytest.param("zero-2", marks=pytest.mark.tables)])
def test_the_host_reads_no_number_in_a_step(worker_pool: WorkerPool, sharding: str) -> None:
    config = tiny()
    plan = with_norm(make_plan(config, pp=2, dp=2, schedule="1f1b", precision="fp32"), sharding)
    for optimizer in ("adamw", "lamb", "nvlamb", "lans", "muon", "momentum"):
        own = stepped_by(plan, optimizer)
        for told in worker_pool.run(step_without_reads, config, own, optimizer, ranks=4):
            assert told == [False, True], optimizer
    resnet = convolutional_jobs.tiny("resnet")
    norms = with_norm(make_plan(resnet, pp=2, dp=2, schedule="1f1b", precision="fp32"), sharding)
    for told in worker_pool.run(step_without_reads, resnet, norms, "momentum", ranks=4):
        assert told == [False, True]
    scaled = plan.model_copy(update={"precision": "fp16"})
    for told in worker_pool.run(step_without_reads, config, scaled, "adamw", ranks=4):
        # The second step was scaled as the first one; its overflow halves the factor of the third.
        factor = f"loss_scale {INITIAL}"
        assert told == [False, factor, True, factor, f"loss_scale {[INITIAL / 2, 0.0]}"]
    # An optimizer that cannot leave a step out by itself needs the host.
    for told in worker_pool.run(step_without_reads, config, plan, "unfused", ranks=4):
        assert all("the host reads a number" in str(one) for one in told)
