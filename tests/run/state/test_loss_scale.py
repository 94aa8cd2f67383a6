"""The factor of all losses grows while gradients are finite, and falls when they overflow."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.run.state.loss_scale import GROWS_AFTER, INITIAL, LEAST, LossScale
from weft.run.streams import Value


def norm_of(number: float) -> Value[torch.Tensor]:
    return Value.of(torch.tensor([number]))


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 4))
def test_the_factor_is_a_power_of_two_that_falls_with_each_overflow(steps: list[bool], stages: int) -> None:
    scale = LossScale()
    for finite in steps:
        before, norm = scale.factor, norm_of(1.0 if finite else math.inf)
        # All stages of a step were scaled alike.
        assert {scale.settle(norm, finite=finite) for _ in range(stages)} == {before}
        assert scale.factor == (before if finite else max(LEAST, before / 2.0))
        assert math.frexp(scale.factor)[0] == 0.5


def test_the_factor_grows_after_many_finite_steps_in_a_row() -> None:
    scale = LossScale()
    for _ in range(GROWS_AFTER - 1):
        scale.settle(norm_of(1.0), finite=True)
    scale.settle(norm_of(math.nan), finite=False)
    assert scale.factor == INITIAL / 2.0
    for _ in range(GROWS_AFTER):
        assert scale.factor == INITIAL / 2.0
        scale.settle(norm_of(1.0), finite=True)
    assert scale.factor == INITIAL
    assert scale.state.tolist() == [INITIAL, 0.0]


def test_the_state_is_all_that_a_checkpoint_needs() -> None:
    first, second = LossScale(), LossScale()
    for _ in range(3):
        first.settle(norm_of(math.inf), finite=False)
    first.settle(norm_of(1.0), finite=True)
    second.state.copy_(first.state)
    for scale in (first, second):
        for _ in range(GROWS_AFTER - 1):
            scale.settle(norm_of(1.0), finite=True)
    assert first.factor == second.factor == INITIAL / 4.0
