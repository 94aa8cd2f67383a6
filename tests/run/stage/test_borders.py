"""Modules take as many inputs as their stages have, and messages are what their receivers expect."""

from __future__ import annotations

import pytest
import torch

from weft.errors import InputError
from weft.run.stage.borders import Crossing, require_plain


def test_modules_of_one_input_are_refused_where_stages_have_several() -> None:
    edges = ((0, 1), (0, 2), (1, 3), (2, 3))
    require_plain({1: torch.nn.Linear(2, 2)}, edges)
    with pytest.raises(InputError) as caught:
        require_plain({3: torch.nn.Linear(2, 2)}, edges)
    assert str(caught.value) == "stage 3: has 2 inputs, and its module takes and gives one value"


def test_a_message_that_its_receiver_does_not_expect_is_refused() -> None:
    one = Crossing((0,), ((2, 8, 4),), torch.float32)
    value = torch.zeros(2, 8, 4)
    assert one.packed([value], 0) is value
    halves = Crossing((0,), ((1, 8, 4),), torch.float32, messages=2)
    both = Crossing((0, 1), ((2, 8, 4), (2, 3)), torch.float32)
    assert both.packed([value, torch.zeros(2, 3)], 0).shape == (2 * 8 * 4 + 2 * 3,)
    for crossing, values in (
        (one, [value[:, :6]]),
        # As many bytes, in another order.
        (one, [value.mT]),
        (one, [value.bfloat16()]),
        (one, [value.double()]),
        (halves, [value[:, :6]]),
        (both, [value, torch.zeros(2, 2)]),
    ):
        with pytest.raises(
            TypeError, match=r"^the message is \[.*; the other stage expects \[.* of torch.float32$"
        ):
            crossing.packed(values, 0)
