"""Only the first sample of an example is taken, and wrong counts are named."""

from __future__ import annotations

import pytest
import torch

from weft.capture.model_arguments import examples_of, require_counts
from weft.errors import InputError


def test_an_example_is_the_first_sample_of_each_input() -> None:
    first, second = examples_of([torch.ones(3, 2), torch.ones(1, 5, requires_grad=True)])
    assert (first.shape, second.shape, second.requires_grad) == ((1, 2), (1, 5), False)


def test_all_wrong_counts_are_named() -> None:
    require_counts(classes=1, sequence=None)
    with pytest.raises(InputError) as refused:
        require_counts(classes=0, sequence=True)
    assert [one.where for one in refused.value.violations] == ["model.build"] * 2
