"""Modules must take as many inputs as their stages have."""

from __future__ import annotations

import pytest
import torch

from weft.errors import InputError
from weft.run.stage.borders import require_plain


def test_modules_of_one_input_are_refused_where_stages_have_several() -> None:
    edges = ((0, 1), (0, 2), (1, 3), (2, 3))
    require_plain({1: torch.nn.Linear(2, 2)}, edges)
    with pytest.raises(InputError) as caught:
        require_plain({3: torch.nn.Linear(2, 2)}, edges)
    assert str(caught.value) == "stage 3: has 2 inputs, and its module takes and gives one value"
