"""Laws: an exchange in two levels gives the rows of one at once, in the same order, in fewer messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_group import ThreadGroup, in_groups

from weft.run.parallel.row_exchange import exchanged

PLACES = [(2, 2), (2, 3), (3, 2)]


class TellingGroup:
    """A group that remembers to which other ranks its rows went."""

    def __init__(self, group: ThreadGroup) -> None:
        self._group, self.place, self.size = group, group.place, group.size
        self.messages: list[int] = []

    def all_to_all_rows(self, taken: torch.Tensor, rows: torch.Tensor, *numbers: Sequence[int]) -> None:
        self.messages += [place for place, number in enumerate(numbers[1]) if number and place != self.place]
        self._group.all_to_all_rows(taken, rows, *numbers)


@settings(max_examples=30)
@given(st.sampled_from(PLACES), st.data())
def test_two_levels_give_the_same_rows_in_the_same_order(nodes: tuple[int, int], data: st.DataObject) -> None:
    count, per_node = nodes
    size = count * per_node
    numbers = st.lists(st.integers(0, 3), min_size=size, max_size=size)
    sent = data.draw(st.lists(numbers, min_size=size, max_size=size))

    def on_rank(group: Any) -> list[torch.Tensor]:
        own = sum(sent[group.place])
        rows = 100 * group.place + torch.arange(own, dtype=torch.float64).unsqueeze(1).expand(own, 2)
        return [exchanged(rows, sent, group, each) for each in (1, per_node)]

    for at_once, in_levels in in_groups(size, on_rank):
        assert torch.equal(at_once, in_levels)


@pytest.mark.parametrize(("nodes", "per_node"), PLACES)
def test_a_rank_sends_each_other_node_one_message(nodes: int, per_node: int) -> None:
    size = nodes * per_node

    def on_rank(group: ThreadGroup) -> list[int]:
        telling: Any = TellingGroup(group)
        exchanged(torch.zeros(size, 1), [[1] * size] * size, telling, per_node)
        return [place for place in telling.messages if place // per_node != group.place // per_node]

    for place, messages in enumerate(in_groups(size, on_rank)):
        assert messages == [one for one in range(place % per_node, size, per_node) if one != place]
