"""Laws of the factor of losses in fp16: a power of two that overflows halve and many steps double."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.run.state.loss_scale import GROWS_AFTER, INITIAL, LEAST, LossScale


def take(scale: LossScale, norm: float, times: int = 1) -> None:
    """Steps with gradients of this norm."""
    for _ in range(times):
        scale.state.copy_(scale.after(torch.tensor([norm], dtype=torch.float64)))


@given(st.lists(st.booleans(), max_size=60))
def test_the_factor_is_a_power_of_two_that_falls_with_each_overflow(steps: list[bool]) -> None:
    scale = LossScale()
    for finite in steps:
        before = scale.factor.item()
        take(scale, 1.0 if finite else math.inf)
        assert scale.factor.item() == (before if finite else max(LEAST, before / 2.0))
        assert math.frexp(scale.factor.item())[0] == 0.5


def test_the_factor_grows_after_many_finite_steps_in_a_row() -> None:
    scale = LossScale()
    take(scale, 1.0, GROWS_AFTER - 1)
    take(scale, math.nan)
    assert scale.state.tolist() == [INITIAL / 2.0, 0.0]
    take(scale, 1.0, GROWS_AFTER - 1)
    assert scale.state.tolist() == [INITIAL / 2.0, GROWS_AFTER - 1]
    take(scale, 1.0)
    assert scale.state.tolist() == [INITIAL, 0.0]


def test_the_state_is_all_that_a_checkpoint_needs() -> None:
    first, second = LossScale(), LossScale()
    take(first, math.inf, 3)
    take(first, 1.0)
    second.state.copy_(first.state)
    for scale in (first, second):
        take(scale, 1.0, GROWS_AFTER - 1)
    assert first.factor == second.factor == INITIAL / 4.0
