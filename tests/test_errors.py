"""Errors are one line per violation, with the nearest valid choice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import InputError, Violation, nearest, nearest_divisor, require_choice


def test_one_line_per_violation():
    error = InputError([Violation("a.b", "3 is too many\nby far", "2"), Violation("", "also this")])
    assert str(error).splitlines() == ["a.b: 3 is too many by far (nearest valid: 2)", "also this"]


def test_nearest_is_close_in_spelling_or_nothing():
    assert nearest("bredth-first", ["gpipe", "breadth-first"]) == "breadth-first"
    assert nearest("zzz", ["gpipe", "breadth-first"]) == ""
    assert nearest("adamW", ["adam", "adamw"]) == "adamw"


def test_an_option_with_all_parts_of_the_word_is_nearer_than_one_with_few_other_letters():
    assert nearest("llama-70b", ["llama-7b", "llama-3-8b", "llama-3-70b"]) == "llama-3-70b"
    assert nearest("llama-8b", ["llama-7b", "llama-3-8b", "llama-3-70b"]) == "llama-3-8b"
    assert nearest("llama-9b", ["llama-7b", "llama-3-70b"]) == "llama-7b"


def test_require_choice_names_the_options():
    require_choice("schedule", "gpipe", ["gpipe"])
    with pytest.raises(
        InputError, match=r"schedule: 'gpip' is not one of 1f1b, gpipe \(nearest valid: gpipe\)"
    ):
        require_choice("schedule", "gpip", ["gpipe", "1f1b"])


@given(st.integers(1, 200), st.lists(st.integers(1, 200), min_size=1, max_size=3))
def test_the_nearest_divisor_divides_all_and_no_other_is_nearer(count: int, wholes: list[int]) -> None:
    near = nearest_divisor(count, *wholes)
    common = [one for one in range(1, 201) if all(whole % one == 0 for whole in wholes)]
    assert near in common
    assert abs(near - count) == min(abs(one - count) for one in common)
