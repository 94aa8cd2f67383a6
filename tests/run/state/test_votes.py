"""Laws: a step that a tensor forbids changes nothing; the next ones are those of an optimizer without it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch

from weft.run.state.votes import decided, leaves_out, leaving_out

Make = Callable[..., torch.optim.Optimizer]
SGD = partial(torch.optim.SGD, lr=0.5, weight_decay=0.1, fused=True)
MAKERS: dict[str, Make] = {
    "sgd": SGD,
    "momentum": partial(SGD, momentum=0.9),
    "nesterov": partial(SGD, momentum=0.9, nesterov=True),
    "adamw": partial(torch.optim.AdamW, lr=0.5, fused=True),
}


def weights_after(make: Make, lost: tuple[bool, ...], *, asks: bool) -> torch.Tensor:
    """After steps of which some are lost: left out if a tensor says so, or not begun."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.nn.Parameter(torch.randn(5, generator=generator))
    optimizer = make([weights])
    for forbidden in lost:
        gradient = torch.randn(5, generator=generator)
        weights.grad = gradient / 0.0 if forbidden else gradient
        vote = decided([torch.zeros(()), torch.tensor(float(forbidden))])
        with leaving_out(optimizer, vote if asks else None):
            if asks or not forbidden:
                optimizer.step()
    return weights.detach()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("lost", list(itertools.product([False, True], repeat=3)), ids=str)
def test_a_step_that_is_left_out_changes_no_bit(
    name: str, lost: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # New momenta are memory of any content.
    monkeypatch.setattr(torch, "empty_like", lambda like, **_: torch.full_like(like, torch.nan))
    made = MAKERS[name]
    assert leaves_out(made([torch.nn.Parameter(torch.zeros(1))]))
    assert torch.equal(weights_after(made, lost, asks=True), weights_after(made, lost, asks=False))


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.5),
        # A first momentum is the whole gradient, later ones a part of it.
        partial(SGD, momentum=0.9, dampening=0.5),
        partial(torch.optim.AdamW, fused=False),
        torch.optim.RMSprop,
    ],
)
def test_of_other_optimizers_the_host_decides(make: Make) -> None:
    assert not leaves_out(make([torch.nn.Parameter(torch.zeros(1))]))
    assert decided([]) is None
