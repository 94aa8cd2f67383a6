"""Laws of layer-wise optimizers: closed forms, lengths of steps, scales, zeros, pieces, steps left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weft.run.state.votes import decided, leaving_out
from weft.run.state.whole_sums import WholeSumsOptimizer
from weft.training.optimizer import layer_wise
from weft.training.optimizer.layer_wise import Lamb, Lans, LayerWise, NvLamb
from weft.training.optimizer.optimizers import OptimizerSettings, optimizer_factory

Weights = dict[str, torch.Tensor]
RATE, BETAS, EPSILON = 0.1, (0.8, 0.95), 1e-6
SHAPES = {"matrix": (4, 3), "vector": (5,), "table": (7, 2)}
KINDS: tuple[type[LayerWise], ...] = (Lamb, NvLamb, Lans)
seeds = st.integers(0, 10**6)


def drawn(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in SHAPES.items()
    }


def stepped(
    kind: type[LayerWise],
    start: Weights,
    gradients: Sequence[Weights],
    *,
    decay: float = 0.3,
    epsilon: float = EPSILON,
    betas: tuple[float, float] = BETAS,
) -> Weights:
    """The weights after steps with these gradients."""
    parameters = {name: nn.Parameter(weight.clone()) for name, weight in start.items()}
    optimizer = kind(parameters.values(), RATE, betas=betas, eps=epsilon, weight_decay=decay)
    for one in gradients:
        for name, parameter in parameters.items():
            parameter.grad = one[name].clone()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def by_hand(
    start: Weights,
    gradients: Sequence[Weights],
    decay: float,
    change: Callable[..., torch.Tensor],
    *,
    unit: bool,
) -> Weights:
    """The weights by the formulas, tensor by tensor."""
    found, (first, second) = {}, BETAS
    for name, weight in start.items():
        mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
        for step, one in enumerate(gradients, 1):
            gradient = one[name] / one[name].norm() if unit else one[name]
            mean = first * mean + (1 - first) * gradient
            square = second * square + (1 - second) * gradient**2
            deviation = (square / (1 - second**step)).sqrt() + EPSILON
            by_mean = mean / (1 - first**step) / deviation + decay * weight
            weight = weight - RATE * change(weight, by_mean, gradient / deviation + decay * weight)
        found[name] = weight
    return found


def lamb_change(weight: torch.Tensor, by_mean: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return weight.norm() / by_mean.norm() * by_mean


def lans_change(weight: torch.Tensor, by_mean: torch.Tensor, by_gradient: torch.Tensor) -> torch.Tensor:
    share = BETAS[0]
    direction = share * by_mean / by_mean.norm() + (1 - share) * by_gradient / by_gradient.norm()
    return weight.norm() * direction


def equal(one: Weights, other: Weights) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=1e-10, atol=1e-12) for name in other)


@pytest.mark.parametrize("kind", KINDS)
@given(seeds, st.floats(0, 0.5))
def test_a_step_is_that_of_the_formulas(kind: type[LayerWise], seed: int, decay: float) -> None:
    start, gradients = drawn(seed), [drawn(seed + number) for number in range(1, 5)]
    change = lans_change if kind is Lans else lamb_change
    expected = by_hand(start, gradients, decay, change, unit=kind is Lans)
    # Tensors that are longer than a piece are stepped in several.
    with patch.object(layer_wise, "ELEMENTS", 6):
        assert equal(stepped(kind, start, gradients, decay=decay), expected)
    assert equal(stepped(kind, start, gradients, decay=decay), expected)


@given(seeds, st.floats(0, 0.5))
def test_a_step_of_lamb_is_as_long_as_the_rate_times_the_weights(seed: int, decay: float) -> None:
    start = drawn(seed)
    found = stepped(Lamb, start, [drawn(seed + 1)], decay=decay)
    for name, weight in start.items():
        assert (found[name] - weight).norm().item() == pytest.approx(RATE * weight.norm().item(), rel=1e-9)


@given(seeds, st.floats(0, 0.5))
def test_no_step_of_lans_is_longer_than_the_rate_times_the_weights(seed: int, decay: float) -> None:
    start = drawn(seed)
    found = stepped(Lans, start, [drawn(seed + 1)], decay=decay)
    for name, weight in start.items():
        assert (found[name] - weight).norm() <= RATE * weight.norm() * (1 + 1e-9)


@pytest.mark.parametrize("kind", KINDS)
@given(seeds, st.floats(0.01, 100))
def test_larger_weights_with_smaller_gradients_step_relatively_alike(
    kind: type[LayerWise], seed: int, scale: float
) -> None:
    start, gradients = drawn(seed), [drawn(seed + 1), drawn(seed + 2)]
    larger = {name: scale * weight for name, weight in start.items()}
    smaller = [{name: one / scale for name, one in each.items()} for each in gradients]
    expected = stepped(kind, start, gradients, decay=0.0, epsilon=0.0)
    found = stepped(kind, larger, smaller, decay=0.0, epsilon=0.0)
    assert equal({name: weight / scale for name, weight in found.items()}, expected)


@given(seeds, st.floats(1e-6, 1e6))
def test_lans_does_not_see_the_scale_of_a_tensors_gradient(seed: int, scale: float) -> None:
    start, gradient = drawn(seed), drawn(seed + 1)
    scaled = {**gradient, "matrix": scale * gradient["matrix"]}
    assert equal(stepped(Lans, start, [scaled]), stepped(Lans, start, [gradient]))


@given(seeds)
def test_lans_without_momentum_follows_the_gradient_alone(seed: int) -> None:
    start, gradients = drawn(seed), [drawn(seed + 1), drawn(seed + 2)]
    with patch(f"{__name__}.BETAS", (0.0, 0.95)):
        expected = by_hand(start, gradients, 0.3, lans_change, unit=True)
    assert equal(stepped(Lans, start, gradients, betas=(0.0, 0.95)), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero", ["weights", "gradients", "both"])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_tensors_of_zeros_step_to_finite_weights(kind: type[LayerWise], zero: str, decay: float) -> None:
    start, gradient = drawn(1), drawn(2)
    if zero != "gradients":
        start["matrix"].zero_()
    if zero != "weights":
        gradient["matrix"].zero_()
    found = stepped(kind, start, [gradient, gradient], decay=decay)
    assert all(weight.isfinite().all() for weight in found.values())
    assert torch.equal(found["matrix"], start["matrix"]) == (
        zero == "both" or (zero, decay) == ("gradients", 0)
    )


def pieces_of(kind: type[LayerWise], start: Weights, cut: int) -> tuple[list[LayerWise], list[nn.Parameter]]:
    """Two optimizers, the first of which has the first `cut` elements of each tensor."""
    both = [
        [nn.Parameter(weight.flatten()[part].clone()) for weight in start.values()]
        for part in (slice(0, cut), slice(cut, None))
    ]
    made = [kind(each, RATE, betas=BETAS, eps=EPSILON, weight_decay=0.3) for each in both]
    return made, [one for each in both for one in each]


def step_together(optimizers: Sequence[WholeSumsOptimizer], exchanges: int) -> None:
    sums = [one.sums() for one in optimizers]
    for _ in range(exchanges - 1):
        whole = sum(sums, torch.zeros_like(sums[0]))
        sums = [one.sums(whole) for one in optimizers]
    for one in optimizers:
        one.step(whole=sum(sums, torch.zeros_like(sums[0])))


@pytest.mark.parametrize("kind", KINDS)
@given(seeds, st.integers(0, 5))
def test_pieces_step_like_the_whole(kind: type[LayerWise], seed: int, cut: int) -> None:
    start, gradients = drawn(seed), [drawn(seed + 1), drawn(seed + 2)]
    optimizers, parameters = pieces_of(kind, start, cut)
    for each in gradients:
        flat = [one.flatten() for one in each.values()]
        for parameter, piece in zip(
            parameters, [one[:cut] for one in flat] + [one[cut:] for one in flat], strict=True
        ):
            parameter.grad = piece.clone()
        step_together(optimizers, len(kind.weft_work.whole_sums))
    halves = zip(parameters[:3], parameters[3:], strict=True)
    found = [torch.cat([first.detach(), second.detach()]) for first, second in halves]
    expected = stepped(kind, start, gradients)
    assert equal(
        dict(zip(start, found, strict=True)), {name: one.flatten() for name, one in expected.items()}
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_step_that_is_left_out_changes_no_bit(kind: type[LayerWise], steps: int) -> None:
    """Neither at once nor later: the steps around it are those without it."""

    def trained(*, broken: bool) -> list[torch.Tensor]:
        weight = nn.Parameter(drawn(1)["matrix"].float())
        optimizer = kind([weight], RATE)
        for number in range(steps + 2):
            lost = number == steps
            if lost and not broken:
                continue
            weight.grad = torch.full_like(weight, torch.nan) if lost else drawn(number)["matrix"].float()
            with leaving_out(optimizer, decided([torch.tensor(float(lost)), torch.zeros(())])):
                optimizer.step()
        return [weight.detach(), *optimizer.state[weight].values()]

    assert all(map(torch.equal, trained(broken=True), trained(broken=False)))


def test_vectors_step_without_ratios_under_lamb_alone() -> None:
    layer = nn.Linear(4, 3).double()
    for name, adapts in (("lamb", False), ("nvlamb", True), ("lans", True)):
        settings = OptimizerSettings(name=name, learning_rate=RATE, weight_decay=0.0, betas=BETAS)
        optimizer = optimizer_factory(settings)(layer)
        [bias] = [group for group in optimizer.param_groups if group["params"][0] is layer.bias]
        assert bias["adapts"] is adapts
    lamb = optimizer_factory(OptimizerSettings(name="lamb", learning_rate=RATE, weight_decay=0.0))(layer)
    before = layer.bias.detach().clone()
    layer.weight.grad, layer.bias.grad = torch.ones_like(layer.weight), torch.ones_like(layer.bias)
    lamb.step()
    # Adam's first step is as long as the rate in every element.
    assert torch.allclose(layer.bias.detach(), before - RATE, atol=1e-6)
