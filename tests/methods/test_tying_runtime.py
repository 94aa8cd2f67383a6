"""Copies of a tied embedding begin with the same bits.

That they train like one weight: `rows/tying.py`.
"""

from __future__ import annotations

import pytest
import torch
from small_plans import tiny

from weft.errors import InputError
from weft.methods.tying.runtime import copies_of
from weft.run.stage.build import build_stage


@pytest.mark.parametrize("family", ["gpt", "llama", "bert"])
def test_copies_begin_with_the_same_bits(family: str) -> None:
    config = tiny(family, tied=True)
    first, last = (build_stage(config, layers, 3, torch.float32) for layers in ([0, 1], [6, 7]))
    copies = copies_of(((0, 2),), 0, {0: first, 2: last})
    assert list(copies) == [0, 2]
    assert torch.equal(copies[0], copies[2])
    # Both have the name that the whole model gives the weight.
    [name] = set(first.state_dict()) & set(last.state_dict())
    assert torch.equal(copies[0], build_stage(config, range(8), 3, torch.float32).state_dict()[name])
    assert build_stage(config, [3], 3, torch.float32).tied_parameters() == ()
    assert build_stage(config, range(8), 3, torch.float32).tied_parameters() == ()


def test_a_stage_that_has_no_copy_is_refused() -> None:
    with pytest.raises(InputError, match="stage 1: has 0 tied parameters, the program gives it 1"):
        copies_of(((0, 1),), 0, {1: torch.nn.Linear(2, 2)})
