"""Synthetic samples: their numbers decide them, and each function can be learned from all inputs alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tower_jobs import drawn_for

from weft.describe.model import Towers
from weft.describe.models import PRESETS
from weft.errors import InputError
from weft.training.data.synthetic import Modalities, require_synthetic

TINY = ("mmt-tiny", "dlrm-tiny", "candle-uno-tiny")


@settings(max_examples=20)
@given(
    name=st.sampled_from(TINY),
    samples=st.lists(st.integers(0, 900), min_size=1, max_size=5),
    held_out=st.booleans(),
)
def test_a_sample_depends_on_its_number_alone(name: str, samples: list[int], held_out: bool) -> None:
    drawn = drawn_for(PRESETS[name])
    inputs, targets = drawn.draw(np.array(samples), held_out=held_out)
    for row, sample in enumerate(samples):
        again, target = drawn_for(PRESETS[name]).draw(np.array([sample]), held_out=held_out)
        assert all(np.array_equal(one[row], other[0]) for one, other in zip(inputs, again, strict=True))
        assert targets[row] == target[0]


@pytest.mark.parametrize("name", TINY)
def test_held_out_samples_are_others_and_sizes_are_those_of_the_model(name: str) -> None:
    config, drawn = PRESETS[name], drawn_for(PRESETS[name])
    towers = config.towers
    assert towers is not None
    (first, *_), _ = drawn.draw(np.arange(64), held_out=False)
    (other, *_), _ = drawn.draw(np.arange(64), held_out=True)
    assert not (first == other).all(axis=1).any()
    inputs, _ = drawn.draw(np.arange(3), held_out=False)
    widths = [config.sequence] * len(towers.tokens) + [
        *towers.features,
        *[towers.looked_up] * len(towers.tables),
    ]
    assert [one.shape for one in inputs] == [(3, width) for width in widths]
    for one, most in zip(inputs[-len(towers.tables) :], towers.tables, strict=False):
        assert one.min() >= 0
        assert one.max() < most


def test_all_modalities_tell_the_class_and_one_alone_does_not() -> None:
    drawn = Modalities(Towers(depth=1, tokens=(7, 9)), sequence=200, classes=9)
    inputs, labels = drawn.draw(np.arange(300), held_out=False)
    for one, most in zip(inputs, (7, 9), strict=True):
        assert one.min() == 0
        assert one.max() == most - 1
    # The most frequent token modulo the base is the digit.
    digits = [np.array([np.bincount(row % 3, minlength=3).argmax() for row in one]) for one in inputs]
    assert (digits[0] + 3 * digits[1] == labels).mean() > 0.99
    for digit in digits:
        # Of each value, a third of the classes is left.
        seen = set(zip(digit.tolist(), labels.tolist(), strict=True))
        assert len({label for shown, label in seen if shown == 0}) >= 3


@pytest.mark.parametrize("name", ["dlrm-tiny", "candle-uno-tiny"])
def test_targets_vary_and_depend_on_every_input(name: str) -> None:
    drawn = drawn_for(PRESETS[name])
    inputs, targets = drawn.draw(np.arange(400), held_out=False)
    assert 0.04 < targets.astype(float).var() < 0.3
    assert len(inputs) == len(drawn.towers.features) + len(drawn.towers.tables)


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(InputError, match=r"a tower has 3 tokens; 16 classes in 2 towers need more .*: 4"):
        Modalities(Towers(depth=1, tokens=(3, 8)), sequence=4, classes=16)
    with pytest.raises(InputError, match=r"task.data: 'digits'; the task has synthetic data alone"):
        require_synthetic("digits")
