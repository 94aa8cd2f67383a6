"""Law: a backward pass in two parts gives the gradients of a whole one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weft.run.stage.split_backward import WeightPart, run_input_part

WIDTH = 4


class Residual(nn.Module):
    """A residual block whose weights meet the way of the input at several nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.outer(torch.tanh(self.inner(self.norm(inputs))))


class Viewed(nn.Module):
    """A stage whose output is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs).view(-1, WIDTH)


class Spare(nn.Module):
    """Its first weight is never used, its second twice."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(self.linear(inputs)))


BLOCKS = (Residual, Viewed, Spare)


def make(kinds: list[int], seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(BLOCKS[kind]() for kind in kinds)).double()


def micro_batches(count: int, *, needs_gradient: bool) -> list[torch.Tensor]:
    return [
        torch.randn(
            3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(number)
        ).requires_grad_(needs_gradient)
        for number in range(count)
    ]


def gradients(module: nn.Module, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    found = [*(parameter.grad for parameter in module.parameters()), *(values.grad for values in inputs)]
    return [None if gradient is None else gradient.clone() for gradient in found]


def require_same(whole: list[torch.Tensor | None], parts: list[torch.Tensor | None]) -> None:
    assert len(whole) == len(parts)
    for expected, found in zip(whole, parts, strict=True):
        if expected is None or found is None:
            assert expected is found
        else:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def differentiate_whole(module: nn.Module, inputs: list[torch.Tensor], *, loss: bool) -> None:
    for values in inputs:
        output = module(values)
        torch.autograd.backward(output.sum() if loss else output, None if loss else torch.ones_like(output))


def differentiate_in_parts(module: nn.Module, inputs: list[torch.Tensor], *, loss: bool, lag: int) -> None:
    """Each weight part comes `lag` input parts after its own."""
    waiting: list[WeightPart] = []
    for values in inputs:
        output = module(values)
        gradient = None if loss else torch.ones_like(output)
        waiting.append(run_input_part(module, [values], [output.sum() if loss else output], [gradient]))
        if len(waiting) > lag:
            waiting.pop(0).run()
    for part in waiting:
        part.run()


@given(
    kinds=st.lists(st.integers(0, len(BLOCKS) - 1), min_size=1, max_size=3),
    count=st.integers(1, 3),
    lag=st.integers(0, 3),
    first=st.booleans(),
    loss=st.booleans(),
)
def test_two_parts_give_the_gradients_of_the_whole(
    kinds: list[int], count: int, lag: int, first: bool, loss: bool
) -> None:
    whole, parts = make(kinds, 0), make(kinds, 0)
    of_whole = micro_batches(count, needs_gradient=not first)
    of_parts = micro_batches(count, needs_gradient=not first)
    differentiate_whole(whole, of_whole, loss=loss)
    differentiate_in_parts(parts, of_parts, loss=loss, lag=lag)
    require_same(gradients(whole, of_whole), gradients(parts, of_parts))


class Again(nn.Module):
    """A layer whose weight is used once more behind another layer, with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(inputs)))))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("lag", [0, 2])
def test_a_weight_that_two_layers_use_gets_the_gradient_of_both(first: bool, lag: int) -> None:
    made = []
    for differentiate in (differentiate_whole, partial(differentiate_in_parts, lag=lag)):
        torch.manual_seed(0)
        # The weight is not the first one, which takes the place of an input.
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Again()).double()
        inputs = micro_batches(3, needs_gradient=not first)
        differentiate(module, inputs, loss=False)
        made.append(gradients(module, inputs))
    require_same(*made)


@pytest.mark.parametrize("first", [False, True])
def test_the_input_part_leaves_the_other_weights_to_the_weight_part(first: bool) -> None:
    module = make([0, 1], 0)
    [values] = micro_batches(1, needs_gradient=not first)
    output = module(values)
    part = run_input_part(module, [values], [output], [torch.ones_like(output)])
    assert (values.grad is None) == first
    parameters = list(module.parameters())
    assert (parameters[0].grad is not None) == first
    assert all(parameter.grad is None for parameter in parameters[1:])
    part.run()
    assert all(parameter.grad is not None for parameter in parameters)


def test_frozen_weights_get_no_gradient() -> None:
    module = make([0, 1], 0)
    module[0].requires_grad_(False)
    [values] = micro_batches(1, needs_gradient=True)
    output = module(values)
    run_input_part(module, [values], [output], [torch.ones_like(output)]).run()
    assert all(parameter.grad is None for parameter in module[0].parameters())
    assert all(parameter.grad is not None for parameter in module[1].parameters())


def test_gradients_are_added_in_place() -> None:
    """The runtime keeps all gradients of a stage in one tensor, of which `.grad` are views."""
    module = make([0, 2], 0)
    flat = torch.zeros(sum(parameter.numel() for parameter in module.parameters()), dtype=torch.float64)
    offset = 0
    for parameter in module.parameters():
        parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    before = [parameter.grad.data_ptr() for parameter in module.parameters()]
    differentiate_in_parts(module, micro_batches(2, needs_gradient=False), loss=False, lag=1)
    assert [parameter.grad.data_ptr() for parameter in module.parameters()] == before
    assert flat.any()
