"""Quantities: what is written reads back, units mean what they say, nonsense is refused in one line."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe import units
from weft.errors import InputError


@given(st.floats(min_value=1e-9, max_value=1e20))
def test_exact_text_reads_back_exactly(value):
    for table, parse in (
        (units.BYTES_PER_SECOND, units.parse_bytes_per_second),
        (units.SECONDS, units.parse_seconds),
        (units.FLOPS_PER_SECOND, units.parse_flops_per_second),
    ):
        assert parse(units.exact_text(value, table, parse)) == value


@given(st.integers(1, 10**18))
def test_bytes_read_back_exactly(count):
    assert units.parse_bytes(units.exact_text(count, units.BYTES, units.parse_bytes)) == count


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_bytes, "80 GB", 80 * 10**9),
        (units.parse_bytes, "80GiB", 80 * 2**30),
        (units.parse_bytes, 1024, 1024),
        (units.parse_bytes, "22.5 GiB", 22.5 * 2**30),
        (units.parse_bytes_per_second, "300 GB/s", 3e11),
        (units.parse_bytes_per_second, "25 Gbit/s", 25e9 / 8),
        (units.parse_bytes_per_second, 1.5e9, 1.5e9),
        (units.parse_seconds, "3 us", 3e-6),
        (units.parse_seconds, "10 us", 1e-5),
        (units.parse_seconds, "5 ms", 5e-3),
        (units.parse_seconds, 0, 0.0),
        (units.parse_flops_per_second, "312 TFLOP/s", 312e12),
    ],
)
def test_units_mean_what_they_say(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    "value",
    [-1, 0, math.nan, math.inf, True, None, [], "", "fast", "3", "-3 GB/s", "0 GB/s", "1e999 GB/s", "3 gb/s"],
)
def test_nonsense_is_refused_in_one_line_that_names_place_and_value(value):
    with pytest.raises(InputError) as refused:
        units.parse_bytes_per_second(value, "node[0].bandwidth")
    assert len(refused.value.violations) == 1
    assert refused.value.violations[0].where == "node[0].bandwidth"
    assert repr(value) in str(refused.value)


@pytest.mark.parametrize(
    ("text", "near"), [("25 Gbits/s", "25 Gbit/s"), ("3 gb/s", "3 GB/s"), ("3 MB", "3 MB/s")]
)
def test_a_wrong_unit_names_the_nearest(text, near):
    with pytest.raises(InputError, match=f"nearest valid: {near}"):
        units.parse_bytes_per_second(text, "link")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.format_bytes(0), "0 B"),
        (units.format_bytes(999), "999 B"),
        (units.format_bytes(85899345920), "85.9 GB"),
        (units.format_count(6_658_072_576), "6.66 B"),
        (units.format_count(12), "12"),
        (units.format_seconds(0), "0 s"),
        (units.format_seconds(0.0158), "15.8 ms"),
        (units.format_seconds(0.9999), "1.00 s"),
        (units.format_seconds(3.2e-6), "3.20 us"),
        (units.format_seconds(7500), "2 h 05 min"),
        (units.format_seconds(5e-9), "5.00 ns"),
    ],
)
def test_formats_for_people(text, expected):
    assert text == expected


@pytest.mark.parametrize(
    ("count", "what", "text"),
    [
        (0, "stage", "0 stages"),
        (1, "stage", "1 stage"),
        (2, "more rank", "2 more ranks"),
        (1, "micro-batch", "1 micro-batch"),
        (3, "micro-batch", "3 micro-batches"),
        (2, "process", "2 processes"),
    ],
)
def test_a_count_of_one_is_singular(count: int, what: str, text: str) -> None:
    assert units.counted(count, what) == text


@given(st.floats(min_value=1e-9, max_value=1e15))
def test_formatted_quantities_keep_three_digits(value):
    number, unit = units.format_bytes(value).split()
    assert float(number) * units.BYTES[unit] == pytest.approx(value, rel=0.006, abs=0.006)


def test_a_value_whose_rounded_text_would_be_too_large_stays_a_number() -> None:
    value = float(999_999_999_974_790_065_439_255_822_337)
    text = units.exact_text(value, units.BYTES_PER_SECOND, units.parse_bytes_per_second)
    assert units.parse_bytes_per_second(text) == value
