"""The partition is exact: no contiguous partition has a lighter heaviest group."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import InputError
from weft.moves.partition import balanced_partition

weights_and_stages = st.lists(st.floats(0.0, 10.0), min_size=1, max_size=9).flatmap(
    lambda weights: st.tuples(st.just(weights), st.integers(1, len(weights)))
)


@given(weights_and_stages)
def test_groups_are_contiguous_cover_all_and_none_is_empty(case):
    weights, stages = case
    groups = balanced_partition(weights, stages)
    assert [layer for group in groups for layer in group] == list(range(len(weights)))
    assert len(groups) == stages
    assert all(groups)


@given(weights_and_stages)
def test_the_heaviest_group_is_as_light_as_brute_force_finds(case):
    weights, stages = case
    heaviest = max(sum(weights[layer] for layer in group) for group in balanced_partition(weights, stages))
    best = min(
        max(sum(weights[a:b]) for a, b in zip((0, *cuts), (*cuts, len(weights)), strict=True))
        for cuts in combinations(range(1, len(weights)), stages - 1)
    )
    assert heaviest == pytest.approx(best, abs=1e-9)


def test_ties_go_to_even_groups():
    assert balanced_partition([4.0, 1.0, 1.0, 1.0, 1.0], 3) == [[0], [1, 2], [3, 4]]


@pytest.mark.parametrize("stages", [0, 4])
def test_more_stages_than_layers_are_refused(stages):
    with pytest.raises(InputError):
        balanced_partition([1.0, 2.0, 3.0], stages)
