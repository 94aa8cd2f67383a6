"""What an optimizer steps in place of parameters, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weft.describe.optimizers import KNOWN_OPTIMIZERS
from weft.run.state.bucket import FlatLayout
from weft.run.state.precision import lower_precision
from weft.run.state.states import make_states
from weft.run.state.stepped import OwnRange, SteppedWeights
from weft.training.optimizer.optimizers import OPTIMIZERS, OptimizerSettings


def in_16_bits(
    module: nn.Module,
    apart: tuple[nn.Parameter, ...] = (),
    make: Callable[..., torch.optim.Optimizer] | None = None,
) -> tuple[SteppedWeights, torch.optim.Optimizer]:
    """One stage of one rank whose optimizer steps fp32 masters."""
    optimizer = (make or torch.optim.AdamW)(module.parameters(), lr=0.25)
    layout = FlatLayout.of(module, apart=apart)
    dtypes = {"dtype": torch.bfloat16, "stepped_dtype": torch.float32}
    states = make_states({0: layout}, {0: optimizer}, {}, "zero-0", **dtypes)
    return states.stepped[0], optimizer


def test_masters_keep_what_parameters_round_away() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    stepped, optimizer = in_16_bits(module, make=torch.optim.SGD)
    assert module.weight.grad is not None
    # A quarter of this is added; numbers of 16 bits above one are 2**-7 apart.
    module.weight.grad.fill_(-(2.0**-7))
    shown = []
    for _ in range(3):
        optimizer.step()
        shown.append(module.weight.item())
    assert shown == [1.0, 1.0, 1 + 2.0**-7]
    assert stepped.pieces[0].stepped.item() == 1 + 3 * 2.0**-9
    assert module.weight.dtype == torch.bfloat16


def test_a_weight_of_another_stage_too_has_a_master_of_its_own() -> None:
    module = nn.Linear(3, 2)
    module.weight.grad = torch.ones(2, 3)
    stepped, optimizer = in_16_bits(module, apart=(module.weight,), make=torch.optim.SGD)
    before = stepped.whole_weights()[module.weight].clone()
    optimizer.step()
    after = stepped.whole_weights()[module.weight]
    assert torch.equal(after, before - 0.25)
    assert torch.equal(module.weight, after.bfloat16())


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_states_have_the_shapes_of_their_parameters_and_counts_have_none(shape: tuple[int, ...]) -> None:
    module = nn.ParameterList([nn.Parameter(torch.ones(shape))])
    stepped, optimizer = in_16_bits(module)
    optimizer.step()
    states = stepped.whole_states()[module[0]]
    assert {leaf: tuple(value.shape) for leaf, value in states.items()} == {
        "step": (),
        "exp_avg": shape,
        "exp_avg_sq": shape,
    }
    assert tuple(stepped.whole_weights()[module[0]].shape) == shape


def test_frozen_parameters_are_cast_and_not_stepped() -> None:
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(requires_grad=False)
    stepped, _ = in_16_bits(module)
    lower_precision(module.parameters(), torch.bfloat16)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    assert [piece.parameter for piece in stepped.pieces if piece.stepped.grad is not None] == [module.weight]


def stepped_by(
    shards: int, sizes: list[int], make: Callable[[nn.Module], torch.optim.Optimizer]
) -> torch.Tensor:
    """Parameters after three steps of optimizers that have a shard each."""
    generator = torch.Generator().manual_seed(0)
    flats = [torch.randn(sum(sizes), generator=generator) for _ in range(4)]
    ranges = []
    for place in range(shards):
        module = nn.ParameterList(nn.Parameter(part.clone()) for part in flats[0].split(sizes))
        layout = FlatLayout.of(module, shards=shards)
        flat, gradient, own = layout.flatten(torch.float32), torch.zeros(layout.length), layout.share(place)
        optimizer = make(module)
        owned = OwnRange(own.start, flat[own], flat[own], gradient[own], group=None)
        SteppedWeights(layout, owned, optimizer)
        for step in flats[1:]:
            for view, part in zip(layout.views(gradient), step.split(sizes), strict=True):
                view.copy_(part)
            optimizer.step()
        ranges.append(flat[own])
    return torch.cat([view.flatten() for view in layout.views(torch.cat(ranges))])


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.integers(2, 5),
    st.sampled_from(sorted(name for name, work in KNOWN_OPTIMIZERS.items() if work.elementwise)),
)
def test_shards_are_stepped_to_the_bits_of_the_whole(sizes: list[int], shards: int, name: str) -> None:
    settings = OptimizerSettings(name=name, learning_rate=0.1, weight_decay=0.1)
    make = partial(OPTIMIZERS[name], settings=settings)
    assert torch.equal(stepped_by(shards, sizes, make), stepped_by(1, sizes, make))
