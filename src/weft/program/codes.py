"""Codes: one integer for each combination of values, over millions of rows at once."""

from __future__ import annotations

import numpy as np

from weft.program.arrays import Ids, Ints

# Up to this number of possible codes per row, marking the present codes is faster than sorting the rows.
_MARKED_CODES = 16
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def codes(*columns: Ints) -> Ints:
    """Return one integer per row; two rows have equal integers if and only if all their columns are equal."""
    code, largest = _from_zero(columns[0])
    for column in columns[1:]:
        values, most = _from_zero(column)
        radix = most + 1
        if (largest + 1) * radix >= 2**62:
            code = np.unique(code, return_inverse=True)[1].astype(np.int64)
            largest = int(code.max(initial=0))
        code = code * radix + values
        largest = (largest + 1) * radix - 1
    return code


def _from_zero(column: Ints) -> tuple[Ints, int]:
    """Return a column without negative values, and its largest value."""
    least, most = int(column.min(initial=0)), int(column.max(initial=0))
    return (column - least, most - least) if least else (column, most)


def mix(value: Ids) -> Ids:
    """Return splitmix64's finaliser of each word: a pseudo-random bijection of 64-bit words."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def numbered(counts: Ints) -> tuple[Ints, Ints]:
    """Return (index, number): each index repeated by its count, and the repetitions numbered from 0."""
    index = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return index, np.arange(len(index), dtype=np.int64) - (np.cumsum(counts) - counts)[index]


def distinct_rows(*columns: Ints) -> tuple[Ints, Ints]:
    """Return (a row of each combination, the combination of every row); combinations are sorted."""
    most = len(columns[0]) * _MARKED_CODES
    # A column with few values far apart, such as bytes, would waste most codes.
    code = codes(*(_ranked(column) if _range(column) > most else column for column in columns))
    if code.max(initial=0) > most:
        _, row, which = np.unique(code, return_index=True, return_inverse=True)
        return row.astype(np.int64), which.ravel().astype(np.int64)
    row_of = np.full(int(code.max(initial=0)) + 1, -1, dtype=np.int64)
    row_of[code] = np.arange(len(code), dtype=np.int64)
    occurring = np.flatnonzero(row_of >= 0)
    number = np.zeros_like(row_of)
    number[occurring] = np.arange(len(occurring), dtype=np.int64)
    return row_of[occurring], number[code]


def _range(column: Ints) -> int:
    return int(column.max() - column.min()) if len(column) else 0


def _ranked(column: Ints) -> Ints:
    return np.searchsorted(np.unique(column), column).astype(np.int64)
