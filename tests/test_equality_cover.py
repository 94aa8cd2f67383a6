"""Chosen cases have all traits of all cases, and each has one that no other has."""

from __future__ import annotations

from equality_cover import covering
from hypothesis import given
from hypothesis import strategies as st

TRAITS = st.lists(st.frozensets(st.integers(0, 8)), max_size=12)


@given(TRAITS)
def test_chosen_cases_have_all_traits_each_some_of_its_own(cases: list[frozenset[int]]) -> None:
    chosen = covering(cases, lambda case: case)
    assert frozenset().union(*chosen) == frozenset().union(*cases)
    for place, case in enumerate(chosen):
        assert case - frozenset().union(*chosen[:place], *chosen[place + 1 :])


def test_cases_that_cost_less_are_chosen_first() -> None:
    cases = [frozenset("abc"), frozenset("ab"), frozenset("c")]
    assert covering(cases, lambda case: case) == cases[:1]
    assert covering(cases, lambda case: case, lambda case: 9.0 if len(case) == 3 else 1.0) == cases[1:]


def test_a_case_is_left_out_again_where_later_ones_have_all_of_it() -> None:
    cases = [frozenset("abcd"), frozenset("abx"), frozenset("cdy")]
    assert covering(cases, lambda case: case) == cases[1:]
