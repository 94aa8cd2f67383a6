"""Laws of Muon: singular values near 1, torch's steps, stacks, steps left out, parameters that it takes."""

from __future__ import annotations

import pytest
import torch
from decoder_models import tiny_decoder
from hypothesis import given
from hypothesis import strategies as st
from small_plans import tiny
from torch import nn

from weft.errors import InputError
from weft.run.stage.build import build_stage
from weft.run.state.votes import decided, leaving_out
from weft.training.optimizer.muon import COEFFICIENTS, SCALES, Muon, orthogonalised
from weft.training.optimizer.optimizers import OptimizerSettings, hidden_matrices, optimizer_factory

RATE, ITERATIONS = 0.02, 5
seeds = st.integers(0, 10**6)
sides = st.integers(1, 12)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def iterated(value: torch.Tensor) -> torch.Tensor:
    """What the iterations make of a singular value, by the published quintic."""
    first, third, fifth = COEFFICIENTS
    for _ in range(ITERATIONS):
        value = first * value + third * value**3 + fifth * value**5
    return value


@given(seeds, sides, sides, st.floats(1e-3, 1e3))
def test_singular_values_come_near_1_and_vectors_stay(
    seed: int, rows: int, columns: int, size: float
) -> None:
    left, _, right = torch.linalg.svd(drawn(seed, rows, columns), full_matrices=False)
    values = 0.05 + torch.rand(min(rows, columns), generator=torch.Generator().manual_seed(seed)).double()
    matrix = size * left @ torch.diag(values) @ right
    found = left.mT @ orthogonalised(matrix, ITERATIONS) @ right.mT
    assert torch.allclose(found, torch.diag(iterated(values / values.norm())), atol=1e-8)
    # The band of Jordan's coefficients.
    assert found.diagonal().min() > 0.65
    assert found.diagonal().max() < 1.21


def test_no_gradient_makes_no_update() -> None:
    assert not orthogonalised(torch.zeros(3, 4), ITERATIONS).any()


@pytest.mark.parametrize("scale", list(SCALES))
@pytest.mark.parametrize("shape", [(64, 32), (32, 64), (48, 48)])
def test_steps_of_matrices_are_those_of_torch(shape: tuple[int, int], scale: str) -> None:
    ours, theirs = (nn.Parameter(drawn(0, *shape).float()) for _ in range(2))
    # torch computes in bf16 on every device.
    muon = Muon([ours], RATE, weight_decay=0.3, scale=scale, computes_in=torch.bfloat16)
    other = torch.optim.Muon([theirs], RATE, weight_decay=0.3, adjust_lr_fn=scale)
    for step in range(1, 5):
        ours.grad, theirs.grad = (drawn(step, *shape).float() for _ in range(2))
        muon.step()
        other.step()
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)
    assert (ours - drawn(0, *shape)).abs().max() > 1e-3


def test_steps_of_other_parameters_are_those_of_adamw() -> None:
    ours, theirs = (nn.Parameter(drawn(0, 40).float()) for _ in range(2))
    muon = Muon([{"params": [ours], "orthogonalises": False}], RATE, weight_decay=0.3)
    other = torch.optim.AdamW([theirs], RATE, betas=(0.9, 0.95), weight_decay=0.3, fused=True)
    for step in range(1, 5):
        ours.grad, theirs.grad = (drawn(step, 40).float() for _ in range(2))
        muon.step()
        other.step()
    assert torch.equal(ours, theirs)


@given(seeds, st.integers(1, 3), sides, sides)
def test_a_stack_steps_as_its_matrices(seed: int, count: int, rows: int, columns: int) -> None:
    start, gradient = drawn(seed, count, rows, columns), drawn(seed + 1, count, rows, columns)
    stack, each = nn.Parameter(start.clone()), [nn.Parameter(one.clone()) for one in start]
    stack.grad = gradient.clone()
    for one, own in zip(each, gradient, strict=True):
        one.grad = own.clone()
    Muon([stack], RATE).step()
    Muon(each, RATE).step()
    assert torch.allclose(stack, torch.stack([one.detach() for one in each]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("orthogonalises", [True, False])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_step_that_is_left_out_changes_no_bit(steps: int, orthogonalises: bool) -> None:
    def trained(*, broken: bool) -> list[torch.Tensor]:
        weight = nn.Parameter(drawn(1, 4, 3).float())
        optimizer = Muon([{"params": [weight], "orthogonalises": orthogonalises}], RATE)
        for number in range(steps + 2):
            lost = number == steps
            if lost and not broken:
                continue
            weight.grad = torch.full_like(weight, torch.nan) if lost else drawn(number, 4, 3).float()
            with leaving_out(optimizer, decided([torch.tensor(float(lost)), torch.zeros(())])):
                optimizer.step()
        return [weight.detach(), *optimizer.state[weight].values()]

    assert all(map(torch.equal, trained(broken=True), trained(broken=False)))


def test_matrices_of_blocks_are_orthogonalised_and_nothing_else() -> None:
    config = tiny(layers=1)
    stage = build_stage(config, range(3), 0, torch.float32)
    optimizer = optimizer_factory(OptimizerSettings(name="muon", learning_rate=RATE, weight_decay=0.1))(stage)
    names = {id(parameter): name for name, parameter in stage.named_parameters()}
    taken = {
        names[id(one)].removeprefix("transformer.h.0.")
        for group in optimizer.param_groups
        if group["orthogonalises"]
        for one in group["params"]
    }
    assert taken == {"attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names)


def test_experts_are_stacks_of_matrices() -> None:
    config = tiny_decoder("mixtral")
    stage = build_stage(config, range(config.layers + 2), 0, torch.float32)
    stacks = [one for one in hidden_matrices(stage) if one.ndim == 3]
    assert len(stacks) == 2 * config.layers


def test_a_stage_without_blocks_is_refused() -> None:
    with pytest.raises(InputError, match="muon needs the blocks of a stage, and Linear names none"):
        hidden_matrices(nn.Linear(2, 2))
