"""Optimizers: what decays, how the rate rises, what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weft.errors import InputError
from weft.training.optimizers import (
    OptimizerSettings,
    learning_rate,
    optimizer_factory,
    set_learning_rate,
)


def settings_with(**changes: object) -> OptimizerSettings:
    values = {
        "name": "adamw",
        "learning_rate": 0.5,
        "warm_up_steps": 4,
        "betas": (0.9, 0.95),
        "weight_decay": 0.1,
    }
    return OptimizerSettings(**{**values, **changes})  # type: ignore[arg-type]


def stage() -> nn.ModuleDict:
    return nn.ModuleDict(
        {"embedding": nn.Embedding(8, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 8), "none": nn.ReLU()}
    )


def test_only_matrices_that_are_no_embeddings_decay() -> None:
    module = stage()
    optimizer = optimizer_factory(settings_with(learning_rate=1.0))(module)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    changed = {name for name, value in module.named_parameters() if not torch.equal(value, before[name])}
    assert changed == {"head.weight"}
    assert torch.allclose(module["head"].weight, before["head.weight"] * 0.9)


def test_a_tied_head_is_an_embedding() -> None:
    module = stage()
    module["head"].weight = module["embedding"].weight
    groups = optimizer_factory(settings_with())(module).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(4, 0.0)]


def test_every_parameter_is_updated() -> None:
    module = stage()
    groups = optimizer_factory(settings_with())(module).param_groups
    updated = {id(parameter) for group in groups for parameter in group["params"]}
    assert updated == {id(parameter) for parameter in module.parameters()}


@given(st.integers(0, 50), st.integers(0, 200))
def test_the_rate_rises_linearly_and_stays(warm_up_steps: int, step: int) -> None:
    rate = learning_rate(settings_with(warm_up_steps=warm_up_steps), step)
    assert rate == pytest.approx(0.5 if step + 1 >= warm_up_steps else 0.5 * (step + 1) / warm_up_steps)
    assert rate > 0


def test_a_rate_is_set_in_every_group() -> None:
    optimizer = optimizer_factory(settings_with())(stage())
    set_learning_rate([optimizer], 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


def test_an_unknown_optimizer_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="nearest valid: adamw"):
        optimizer_factory(settings_with(name="adam"))
