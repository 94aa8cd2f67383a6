"""Constants of `config.json`: read under both spellings, refused where they are no numbers above 0."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.model import read_constants

numbers = st.floats(min_value=1e-12, max_value=1e12)


@given(numbers, numbers)
def test_rotary_base_stands_on_top_or_among_the_rotary_parameters(epsilon: float, base: float) -> None:
    expected = {"norm_epsilon": epsilon, "rotary_base": base}
    old = {"rms_norm_eps": epsilon, "rope_theta": base}
    new = {"rms_norm_eps": epsilon, "rope_parameters": {"rope_theta": base}}
    assert read_constants(old, "llama", "") == (expected, [])
    assert read_constants(new, "llama", "") == (expected, [])


def test_what_is_absent_or_of_another_family_is_not_given() -> None:
    assert read_constants({"rms_norm_eps": None, "rope_parameters": None}, "llama", "") == ({}, [])
    assert read_constants({"rms_norm_eps": 1.0}, "gpt", "") == ({}, [])
    assert read_constants({"layer_norm_epsilon": 1}, "gpt", "") == ({"norm_epsilon": 1.0}, [])
    assert read_constants({"layer_norm_eps": 1.0}, "another", "") == ({}, [])


@pytest.mark.parametrize("value", [0, -1e-5, True, "1e-5", [1], math.inf])
def test_what_is_no_number_above_zero_is_refused(value: object) -> None:
    constants, problems = read_constants({"rms_norm_eps": value, "rope_theta": value}, "llama", "file")
    assert constants == {}
    assert [problem.where for problem in problems] == ["file: rms_norm_eps", "file: rope_theta"]
    assert all("must be a number above 0" in str(problem) for problem in problems)


@pytest.mark.parametrize("table", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("yarn", "'yarn': must be an object"),
        ([], "[]: must be an object"),
        ({"factor": "abc"}, "'abc': must be a number above 0"),
        ({"factor": 0}, "0: must be a number above 0"),
        ({"factor": True}, "True: must be a number above 0"),
        ({"factor": None}, None),
        ({"rope_type": "llama3", "factor": 8.0}, None),
    ],
)
def test_a_scaling_of_positions_that_is_none_is_named(table: str, value: object, problem: str | None) -> None:
    constants, problems = read_constants({table: value}, "llama", "c.json")
    assert constants == {}
    assert [one.problem for one in problems] == ([] if problem is None else [problem])
    assert all(one.where.startswith(f"c.json: {table}") for one in problems)
