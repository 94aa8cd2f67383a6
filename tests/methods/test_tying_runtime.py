"""Copies of a tied embedding begin with the same bits, and all of them get one gradient, whole or in shards.

That they train like one weight: `rows/tying.py`.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_plans import tiny
from thread_group import ThreadGroup, in_groups
from torch import nn

from weft.errors import InputError
from weft.methods.tying.runtime.copies import copies_of
from weft.methods.tying.runtime.shards import TiedShards
from weft.run.stage.build import build_stage
from weft.run.state.stepped import Piece


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


def piece_of(copy: nn.Parameter, start: int, end: int, gradient: torch.Tensor) -> Piece:
    stepped = nn.Parameter(torch.zeros(end - start))
    stepped.grad = gradient[start:end].clone()
    return Piece(copy, 0, start, end, stepped)


@given(
    length=st.integers(1, 40),
    borders=st.lists(st.lists(st.integers(0, 40), min_size=2, max_size=2), min_size=2, max_size=3),
    together=st.booleans(),
    sent_as=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_shards_of_all_copies_get_the_same_sum(
    length: int, borders: list[list[int]], together: bool, sent_as: torch.dtype
) -> None:
    """Wherever shards begin, whether a rank has shards of one copy or of all of them."""
    stages = tuple(range(3, 3 + len(borders)))
    gradients = torch.randn(len(stages), length, generator=torch.Generator().manual_seed(length))
    expected = torch.zeros(length)
    for one in gradients:
        expected += one.to(sent_as)
    cuts = [[0, *sorted(min(one, length) for one in ends), length] for ends in borders]
    owned = [list(pairwise(ends)) for ends in cuts]
    ranks = 3 if together else 3 * len(stages)

    def run(group: ThreadGroup) -> list[tuple[int, torch.Tensor]]:
        mine = range(len(stages)) if together else [group.place // 3]
        copies = {stages[one]: nn.Parameter(torch.zeros(length)) for one in mine}
        pieces, ends = {}, {one: owned[one][group.place % 3] for one in mine}
        for one in mine:
            copy = copies[stages[one]]
            found = [piece_of(copy, *ends[one], gradients[one])] if len(range(*ends[one])) else []
            pieces[stages[one]] = SimpleNamespace(pieces=(*found,))
        shards = TiedShards(copies, stages, group, sent_as)  # type: ignore[arg-type]  # as far as needed
        stepped: Any = pieces
        shards.begin(stepped, torch.device("cpu"))
        shards.add_up(torch.empty(0))
        assert shards.counted_elsewhere == tuple(stage for stage in copies if stage != 3)
        return [(one.start, one.stepped.grad) for each in pieces.values() for one in each.pieces]

    found = [one for of_rank in in_groups(ranks, run) for one in of_rank]
    assert sum(len(sums) for _, sums in found) == length * len(stages)
    assert all(torch.equal(sums, expected[start : start + len(sums)]) for start, sums in found)
