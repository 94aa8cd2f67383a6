"""Combinations of values over many rows: equal codes for equal rows, whatever the values."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weft.program.codes import codes, distinct_rows

values = st.one_of(st.integers(-1, 3), st.integers(-(2**40), 2**40))
tables = st.integers(1, 3).flatmap(
    lambda width: st.lists(st.tuples(*[values] * width), min_size=1, max_size=30)
)


@given(tables)
def test_codes_are_equal_exactly_where_rows_are(rows):
    code = codes(*np.array(rows, dtype=np.int64).T)
    known = dict(zip(rows, code.tolist(), strict=True))
    assert [known[row] for row in rows] == code.tolist()
    assert len(set(known.values())) == len(known)


@given(tables)
def test_distinct_rows_are_sorted_and_lead_back_to_every_row(rows):
    table = np.array(rows, dtype=np.int64)
    first, which = distinct_rows(*table.T)
    assert [rows[row] for row in first.tolist()] == sorted(set(rows))
    assert table[first][which].tolist() == table.tolist()


def test_no_rows_have_no_combinations():
    first, which = distinct_rows(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    assert (len(first), len(which)) == (0, 0)
