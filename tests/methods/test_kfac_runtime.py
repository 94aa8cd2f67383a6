"""Laws of K-FAC on ranks: factors, inverses, and runs that stop inside a window."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from equality_table import Row, whole_tensors
from filled_plans import fills, kfac, placed
from hypothesis import given
from hypothesis import strategies as st
from methods.test_local_averaging_runtime import resume
from pool import WorkerPool
from saved_checkpoints import save_checkpoint
from small_jobs import SEED, batch_of, make_runtime
from small_plans import divisible, make_program, tiny

from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.plan import Plan
from weft.methods.bubble_filling.options import options_of, read_windows
from weft.methods.kfac.runtime.factors import DampedInverse, Eigenvectors, Factor, damped_inverse
from weft.methods.kfac.runtime.stage_curvature import LayerCurvature
from weft.methods.kfac.runtime.treated_linears import TreatedLinear, TreatedOperand
from weft.training.checkpoint import checkpoints
from weft.training.checkpoint.training_state import TrainingState

SIZES = st.integers(1, 6)


def rows(seed: int, count: int, size: int) -> torch.Tensor:
    return torch.randn(count, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def factor_of(parts: list[torch.Tensor], form: type[Factor] = DampedInverse) -> Factor:
    found, count = form(parts[0].shape[-1], torch.float64, torch.device("cpu")), sum(map(len, parts))
    for one in parts:
        found.add(one, 1.0 / count)
    found.complete()
    return found


@given(st.integers(0, 2**32), SIZES, st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_micro_batches_add_up_to_the_factor_of_the_whole_batch(
    seed: int, size: int, counts: list[int]
) -> None:
    whole = rows(seed, sum(counts), size)
    found = factor_of(list(whole.split(counts))).sum
    assert torch.allclose(found, whole.T @ whole / len(whole), rtol=1e-12, atol=1e-12)
    assert torch.allclose(found, found.T, rtol=1e-14, atol=1e-14)
    assert torch.linalg.eigvalsh(found).min() > -1e-12


def eye(size: int) -> torch.Tensor:
    return torch.eye(size, dtype=torch.float64)


@given(st.integers(0, 2**32), SIZES, SIZES, st.floats(1e-3, 10.0))
def test_inverses_are_those_of_the_kronecker_product_with_damped_factors(
    seed: int, inner: int, outer: int, damping: float
) -> None:
    a, b = factor_of([rows(seed, 9, inner)]), factor_of([rows(seed + 1, 9, outer)])
    root, ratio = damping**0.5, float((a.mean / b.mean).sqrt())
    damped_a, damped_b = a.sum + root * ratio * eye(inner), b.sum + root / ratio * eye(outer)
    assert a.invert(damping, b.mean)
    assert b.invert(damping, a.mean)
    gradient = rows(seed + 2, outer, inner)
    expected = torch.linalg.solve(torch.kron(damped_b, damped_a), gradient.flatten()).view(outer, inner)
    assert torch.allclose(b.next[0] @ gradient @ a.next[0], expected, rtol=1e-7, atol=1e-9)
    # The product of the damped factors is the damped product, and two terms across.
    across = root * ratio * torch.kron(damped_b - root / ratio * eye(outer), eye(inner))
    across += root / ratio * torch.kron(eye(outer), damped_a - root * ratio * eye(inner))
    plain = torch.kron(damped_b - root / ratio * eye(outer), damped_a - root * ratio * eye(inner))
    damped = plain + damping * eye(inner * outer) + across
    assert torch.allclose(torch.kron(damped_b, damped_a), damped, rtol=1e-9, atol=1e-9)


@given(st.integers(0, 2**32), SIZES, SIZES, st.floats(1e-3, 10.0))
def test_eigenvectors_give_the_inverse_of_the_damped_kronecker_product(
    seed: int, inner: int, outer: int, damping: float
) -> None:
    a, b = (
        factor_of([rows(seed, 9, inner)], Eigenvectors),
        factor_of([rows(seed + 1, 9, outer)], Eigenvectors),
    )
    damped = torch.kron(b.sum, a.sum) + damping * eye(inner * outer)
    of_bias = b.sum + damping * eye(outer)
    for one, other in ((a, b), (b, a)):
        assert one.invert(damping, other.mean)
    gradient, bias = rows(seed + 2, outer, inner), rows(seed + 3, 1, outer)[0]
    found = Eigenvectors.multiplied(gradient, b.next, a.next, damping)
    expected = torch.linalg.solve(damped, gradient.flatten()).view(outer, inner)
    assert torch.allclose(found, expected, rtol=1e-7, atol=1e-9)
    found = Eigenvectors.multiplied(bias, b.next, (), damping)
    assert torch.allclose(found, torch.linalg.solve(of_bias, bias), rtol=1e-7, atol=1e-9)


def test_large_damping_gives_the_gradient_over_the_damping() -> None:
    a, b = factor_of([rows(1, 9, 4)]), factor_of([rows(2, 9, 3)])
    a.invert(1e12, b.mean)
    b.invert(1e12, a.mean)
    gradient = rows(3, 3, 4)
    assert torch.allclose(1e12 * (b.next[0] @ gradient @ a.next[0]), gradient, rtol=1e-5)


@given(st.floats(1e-3, 10.0))
def test_factors_of_one_scale_all_gradients_alike(damping: float) -> None:
    a, b = (DampedInverse(size, torch.float64, torch.device("cpu")) for size in (4, 3))
    for one in (a, b):
        one.sum.copy_(torch.eye(len(one.sum)))
        one.begun.fill_(1)
        one.complete()
    a.invert(damping, b.mean)
    b.invert(damping, a.mean)
    gradient = rows(3, 3, 4)
    assert torch.allclose(b.next[0] @ gradient @ a.next[0], gradient / (1.0 + damping**0.5) ** 2)


def test_a_sum_of_nothing_keeps_the_inverse_and_says_so() -> None:
    one = factor_of([rows(1, 9, 4)])
    assert one.invert(1e-3, one.mean)
    kept = one.next[0].clone()
    assert not one.invert(1e-3, one.mean)
    assert torch.equal(one.next[0], kept)
    # A layer that a step has not used leaves zeros.
    one.add(torch.zeros(5, 4, dtype=torch.float64), 1.0)
    assert one.invert(1e-3, one.mean)
    assert torch.equal(one.next[0], kept)


def test_an_indefinite_factor_is_damped_more_and_one_that_is_not_finite_refused() -> None:
    matrix = torch.eye(3) - 1.5 * torch.ones(3, 3) / 3
    found = damped_inverse(matrix, 0.1)
    assert torch.allclose(found, torch.linalg.inv(matrix + 1.0 * torch.eye(3)), rtol=1e-4)
    for row, column in ((0, 0), (2, 2), (2, 0), (2, 1)):
        for wrong in (float("nan"), float("inf")):
            broken = torch.eye(3)
            broken[row, column] = broken[column, row] = wrong
            with pytest.raises(FloatingPointError, match="not finite"):
                damped_inverse(broken, 0.1)
    with pytest.raises(FloatingPointError, match=r"indefinite with 0\.01 added"):
        damped_inverse(-torch.eye(2), 1e-6)


def test_steps_use_new_inverses_when_all_of_a_layer_are_there() -> None:
    weight = torch.ones(3, 4, dtype=torch.float64)
    factor = DampedInverse(3, torch.float64, torch.device("cpu"))
    linear = TreatedLinear("layer", (torch.nn.Parameter(weight),), (weight,), False, factor, None)
    layer = LayerCurvature(
        [TreatedOperand((linear,), DampedInverse(4, torch.float64, torch.device("cpu")))],
        pieces=2,
        damping=1.0,
    )
    for micro_batch in range(2):
        layer.add(0, [rows(micro_batch, 9, 4)], 7, [18])
    layer.add(1, [rows(2, 9, 3)], 7, [18])
    layer.invert(0, 0)
    layer.precondition()
    assert torch.equal(weight, torch.ones_like(weight))
    layer.add(1, [rows(3, 9, 3)], 7, [18])
    layer.invert(1, 0)
    assert int(layer.used) == 7
    layer.precondition()
    expected = linear.factor.next[0] @ torch.ones_like(weight) @ layer.inputs[0].next[0]
    assert torch.equal(weight, expected)
    assert not torch.allclose(weight, torch.ones_like(weight))


GPT, MIXED, BERT = tiny(layers=2), resolve_model("own_models:mixed"), divisible("bert", sequence=7)


def filled(model: ModelConfig, micro_batches: int, form: str, tp: int) -> Plan:
    dp = 1 if tp > 1 else 2
    plan = Row(model, "1f1b", pp=2, dp=dp, tp=tp, micro_batches=micro_batches, precision="fp32").plan
    return placed(model, plan.model_copy(update={"methods": (kfac(model, form=form), fills())}))


@pytest.mark.parametrize(
    ("model", "micro_batches", "form", "done", "tp"),
    [
        (GPT, 4, "inverse", 1, 1),
        (GPT, 4, "inverse", 2, 1),
        (GPT, 4, "inverse", 3, 1),
        (MIXED, 8, "inverse", 1, 1),
        (MIXED, 8, "eigen", 3, 1),
        # Tensor ranks, which divide the tokens of the first model only.
        (GPT, 8, "eigen", 3, 2),
        (BERT, 8, "inverse", 3, 2),
    ],
    ids=lambda one: getattr(one, "name", str(one)),
)
def test_a_run_that_stops_inside_a_window_goes_on_to_the_bit(
    worker_pool: WorkerPool,
    tmp_path: Path,
    model: ModelConfig,
    micro_batches: int,
    form: str,
    done: int,
    tp: int,
) -> None:
    plan = filled(model, micro_batches, form, tp)
    steps = [one.steps for one in read_windows(options_of(plan).windows)]
    assert max(steps) > 1, "every step is a window"
    for (losses, whole), (first, _), (second, resumed) in worker_pool.run(
        resume, model, plan, tmp_path, done, ranks=plan.ranks
    ):
        assert first + second == losses
        assert all(torch.equal(value, whole[name]) for name, value in resumed.items())


STATE = TrainingState(
    step=2, plan_id="f00d", seed=SEED, samples=0, model="", precision="", data="", first_loss=0.0
)


def go_on(
    rank: int, ranks: int, config: ModelConfig, plan: Plan, folder: Path, steps: range
) -> dict[str, torch.Tensor]:
    """Train these steps, from a checkpoint behind step 0 if they do not begin there, which saves one."""
    runtime = make_runtime(rank, config, plan, make_program(config, plan))
    parts = runtime.stages, runtime.optimizers, runtime.stepped, runtime.methods
    if steps.start:
        checkpoints.load(folder / f"step-{STATE.step:08}", *parts)
    for step in steps:
        if step == STATE.step and not steps.start:
            save_checkpoint(folder, STATE, *parts, keep=1)
        runtime.step(step, batch_of(config, plan, step))
    found = whole_tensors(runtime)
    runtime.close()
    return found


@pytest.mark.parametrize("other", [{"pp": 2}, {"tp": 2}, {"dp": 2, "micro_batches": 2, "sharding": "zero-1"}])
def test_another_plan_goes_on_with_the_inverses_of_tensor_ranks(
    worker_pool: WorkerPool, tmp_path: Path, other: dict[str, object]
) -> None:
    """All steps use the inverses of the first one."""
    model = divisible("llama")
    choice = {"methods": (kfac(model, every=10),)}
    divided = Row(model, "1f1b", pp=2, tp=2).plan.model_copy(update=choice)
    expected = worker_pool.run(go_on, model, divided, tmp_path, range(4), ranks=4)
    plan = Row(model, **other).plan.model_copy(update=choice)
    for found in worker_pool.run(go_on, model, plan, tmp_path, range(2, 4), ranks=plan.ranks):
        for name, value in found.items():
            whole = next(one[name] for one in expected if name in one)
            torch.testing.assert_close(value, whole, rtol=1e-9, atol=1e-12, msg=name)
