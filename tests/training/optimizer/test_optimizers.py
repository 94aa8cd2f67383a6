"""Optimizers: closed forms of their steps, what decays, what is refused."""

from pathlib import Path

import pytest
import torch
from decoder_models import tiny_decoder
from hypothesis import given
from hypothesis import strategies as st
from own_optimizers import SignMomentum
from torch import nn

from weft.describe.optimizers import OptimizerWork
from weft.describe.plan_subject import subject_of
from weft.describe.run_file import parse_run
from weft.errors import InputError
from weft.planning.planned import plan_run, planned_for
from weft.run.stage.build import build_stage
from weft.run.state.stepped import require_elementwise
from weft.training.optimizer.optimizers import (
    OptimizerSettings,
    optimizer_factory,
    set_learning_rate,
    settings_of,
)
from weft.training.session import prepare


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


@pytest.mark.parametrize(
    ("optimizer", "decay_all"), [("adamw", False), ("adamw", True), ("adam", True), ("muon", False)]
)
def test_parameters_without_gradients_stay_as_they_are(optimizer: str, decay_all: bool) -> None:
    module = build_stage(tiny_decoder("deepseek_v32"), [1], 0, torch.float32)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    made = optimizer_factory(settings_with(name=optimizer, decay_all=decay_all))(module)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    # Optimizers of matrices step in several parts.
    for name in ("begin", "finish") if optimizer == "muon" else ("step",):
        getattr(made, name)()
    same = {name for name, value in module.named_parameters() if torch.equal(value, before[name])}
    unlearned = {name for name in before if ".indexer." in name}
    assert unlearned <= same
    assert any(name.endswith("q_a_proj.weight") for name in before.keys() - same)


def test_every_parameter_is_updated() -> None:
    module = stage()
    groups = optimizer_factory(settings_with())(module).param_groups
    updated = {id(parameter) for group in groups for parameter in group["params"]}
    assert updated == {id(parameter) for parameter in module.parameters()}


def stepped(settings: OptimizerSettings, gradients: list[torch.Tensor], start: torch.Tensor) -> torch.Tensor:
    """The weight after steps with these gradients."""
    layer = nn.Linear(*reversed(start.shape), bias=False, dtype=start.dtype)
    layer.weight.data.copy_(start)
    optimizer = optimizer_factory(settings)(layer)
    for gradient in gradients:
        layer.weight.grad = gradient.clone()
        optimizer.step()
    return layer.weight.detach()


def drawn(seed: int, steps: int = 4) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(3, 2, dtype=torch.float64, generator=generator) for _ in range(steps + 1)]
    return values[0], values[1:]


@given(st.integers(0, 1000), st.floats(0, 0.95), st.floats(0, 0.5))
def test_sgd_sums_gradients_that_fade_with_the_momentum(seed: int, momentum: float, decay: float) -> None:
    start, gradients = drawn(seed)
    settings = settings_with(name="sgd", momentum=momentum, weight_decay=decay, learning_rate=0.1)
    weight, velocity = start, torch.zeros_like(start)
    for gradient in gradients:
        velocity = momentum * velocity + gradient + decay * weight
        weight = weight - 0.1 * velocity
    assert torch.allclose(stepped(settings, gradients, start), weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["adam", "adamw"])
@given(st.integers(0, 1000), st.floats(0, 0.9), st.floats(0, 0.99), st.floats(0, 0.5))
def test_adam_divides_moments(name: str, seed: int, first: float, second: float, decay: float) -> None:
    start, gradients = drawn(seed)
    settings = settings_with(name=name, betas=(first, second), weight_decay=decay, learning_rate=0.1)
    weight, mean, square = start, torch.zeros_like(start), torch.zeros_like(start)
    for step, gradient in enumerate(gradients, 1):
        if name == "adam":
            gradient = gradient + decay * weight
        else:
            weight = weight * (1 - 0.1 * decay)
        mean = first * mean + (1 - first) * gradient
        square = second * square + (1 - second) * gradient**2
        deviation = (square / (1 - second**step)).sqrt() + 1e-8
        weight = weight - 0.1 * (mean / (1 - first**step)) / deviation
    assert torch.allclose(stepped(settings, gradients, start), weight, rtol=0, atol=1e-9)


def test_all_parameters_decay_when_all_shall() -> None:
    groups = optimizer_factory(settings_with(decay_all=True))(stage()).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(5, 0.1)]


def test_keys_that_are_left_out_have_their_defaults() -> None:
    record = {"model": {"preset": "gpt-1m"}, "train": {"steps": 70}}
    settings = settings_of(parse_run({**record, "optimizer": {"name": "sgd"}}))
    assert (settings.momentum, settings.schedule, settings.decay_steps) == (0.9, "constant", 70)
    given = {"name": "adam", "betas": [0.5, 0.6], "schedule": "cosine", "decay_steps": 20, "warm_up_steps": 3}
    settings = settings_of(parse_run({**record, "optimizer": {**given, "final_learning_rate": 1e-4}}))
    assert (settings.betas, settings.decay_steps, settings.final_learning_rate) == ((0.5, 0.6), 20, 1e-4)
    assert settings_of(parse_run(record)).betas == (0.9, 0.95)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "sgd", "betas": [0.5, 0.5]}, 'betas: has no effect with name = "sgd"; leave it out'),
        ({"momentum": 0.5}, 'momentum: has no effect with name = "adamw"; leave it out'),
        ({"decay_steps": 50}, 'decay_steps: has no effect with schedule = "constant"; leave it out'),
        (
            {"final_learning_rate": 0.0},
            'final_learning_rate: has no effect with schedule = "constant"; leave it out',
        ),
        (
            {"schedule": "cosine", "final_learning_rate": 0.5, "learning_rate": 0.25},
            "final_learning_rate: 0.5 is above learning_rate, 0.25 (nearest valid: 0.25)",
        ),
        (
            {"schedule": "linear", "decay_steps": 5, "warm_up_steps": 5},
            "decay_steps: 5 leaves nothing after warm_up_steps = 5 (nearest valid: 6)",
        ),
    ],
)
def test_keys_without_effect_are_refused(table: dict, message: str) -> None:
    with pytest.raises(InputError) as refusal:
        parse_run({"model": {"preset": "gpt-1m"}, "optimizer": table})
    assert str(refusal.value) == f"run: optimizer: {message}"


def test_a_rate_is_set_in_every_group() -> None:
    optimizer = optimizer_factory(settings_with())(stage())
    set_learning_rate([optimizer], 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


def test_an_unknown_optimizer_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="nearest valid: adam"):
        optimizer_factory(settings_with(name="adamv"))


def test_another_packages_optimizer_steps_with_weft_s_groups() -> None:
    layer = nn.Linear(2, 3)
    before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    settings = settings_with(name="own_optimizers:SignMomentum", learning_rate=0.25, weight_decay=0.5)
    optimizer = optimizer_factory(settings)(layer)
    assert type(optimizer) is SignMomentum
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.equal(layer.weight, before["weight"] * 0.875 - 0.25)
    assert torch.equal(layer.bias, before["bias"] - 0.25)


def test_what_a_maker_says_is_said_of_its_optimizers() -> None:
    optimizer = optimizer_factory(settings_with(name="own_optimizers:momentum_sgd"))(stage())
    assert optimizer.weft_work == OptimizerWork(states=1, elementwise=True)  # type: ignore[attr-defined]
    require_elementwise([optimizer], "a share")
    silent = optimizer_factory(settings_with(name="own_optimizers:Silent"))(stage())
    with pytest.raises(InputError, match="Silent is not known to step every element by itself"):
        require_elementwise([silent], "a share")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_optimizer", "made str, which is no torch optimizer"),
        ("unlike", "does not take parameter groups and lr"),
        ("Eager", "makes its states before its first step, which weft cannot share out"),
        ("Nothing", "cannot be imported"),
    ],
)
def test_what_is_no_optimizer_for_weft_is_refused(name: str, words: str) -> None:
    with pytest.raises(InputError, match=f"^optimizer.name: 'own_optimizers:{name}' {words}"):
        optimizer_factory(settings_with(name=f"own_optimizers:{name}"))(stage())


def test_a_plan_that_counts_less_than_its_run_keeps_is_not_trained(tmp_path: Path) -> None:
    record = {"model": {"preset": "gpt-1m"}, "cluster": {"use": "1xt4"}, "optimizer": {"name": "sgd"}}
    frugal = plan_run(parse_run(record))
    costly = plan_run(parse_run({**record, "optimizer": {}}))
    with prepare(planned_for(subject_of(frugal.run), costly.plan), tmp_path / "counts-more") as directory:
        directory.require()
    refused = prepare(planned_for(subject_of(costly.run), frugal.plan), tmp_path / "counts-less")
    with pytest.raises(InputError, match="counts 4 bytes of states per parameter; adamw keeps 8"):
        refused.__enter__()
    assert not (tmp_path / "counts-less").exists()
