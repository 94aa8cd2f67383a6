"""A plan in words."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.web.rows.plan import spans


@given(st.sets(st.integers(0, 60)))
def test_spans_say_every_number_once(numbers: set[int]) -> None:
    said: list[int] = []
    for part in filter(None, spans(sorted(numbers)).split(", ")):
        first, _, last = part.partition("-")
        said.extend(range(int(first), int(last or first) + 1))
    assert said == sorted(numbers)
