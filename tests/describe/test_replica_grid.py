"""Law: along every axis of a grid each rank is in one group, at the place of its share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.replica_grid import ReplicaGrid

DEGREES = st.integers(1, 4)


@given(grid=st.builds(ReplicaGrid, DEGREES, DEGREES, DEGREES), first=st.integers(0, 9))
def test_groups_have_each_rank_once_at_the_place_of_its_share(grid: ReplicaGrid, first: int) -> None:
    ranks = tuple(range(first, first + 3 * grid.ranks, 3))
    assert len(ranks) == grid.ranks
    for axis, groups in enumerate(grid.groups(ranks)):
        assert sorted(rank for group in groups for rank in group) == list(ranks)
        for group in groups:
            shares = [grid.shares(ranks.index(rank)) for rank in group]
            assert [share[axis] for share in shares] == [(place, grid[axis]) for place in range(grid[axis])]
            # Nothing else tells them apart.
            assert len({(*share[:axis], *share[axis + 1 :]) for share in shares}) == 1


def test_tensor_ranks_are_neighbours_and_context_ranks_as_far_apart_as_there_are_tensor_ranks() -> None:
    grid = ReplicaGrid(tensor=2, context=3)
    assert grid.tensor_groups(range(6)) == ((0, 1), (2, 3), (4, 5))
    assert grid.context_groups(range(6)) == ((0, 2, 4), (1, 3, 5))
    alone = tuple((rank,) for rank in range(6))
    assert grid.groups(range(6)) == (grid.tensor_groups(range(6)), grid.context_groups(range(6)), alone)
    assert ReplicaGrid(tensor=2, expert=3).expert_groups(range(6)) == ((0, 2, 4), (1, 3, 5))


@pytest.mark.parametrize("ranks", [(4,), (4, 5)])
def test_ranks_that_divide_nothing_are_alone(ranks: tuple[int, ...]) -> None:
    assert ReplicaGrid().context_groups(ranks) == tuple((rank,) for rank in ranks)
