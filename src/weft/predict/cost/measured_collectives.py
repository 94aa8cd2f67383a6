"""Times of collectives among any number of ranks, from tables that were measured among a few numbers.

A ring of n ranks takes n - 1 turns, and moves (n - 1) / n of the bytes in each direction. So a table of m
ranks says how long n take. The time of its smallest size scales with the turns, the rest with the bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping

from weft.predict.profile import Table, value_at

# Half-widths of 90 % intervals. They are about as large as the errors of benchmarks/collective_ranks.py.
BETWEEN_HALF_WIDTH, BEYOND_HALF_WIDTH = 0.5, 0.8


def collective_s(tables: Mapping[int, Table], ranks: int, moved_bytes: float) -> float:
    """Return the seconds of a collective among so many ranks, two or more.

    Between two measured numbers of ranks, it interpolates linearly what the tables of both say of a ring.
    Below and above all, the nearest table says it.
    """
    if ranks in tables:
        return value_at(tables[ranks], moved_bytes)
    counts = sorted(tables)
    place = bisect_left(counts, ranks)
    around = counts[max(0, place - 1) : place + 1]
    seconds = [_ring_s(tables[count], count, ranks, moved_bytes) for count in around]
    nearness = (ranks - around[0]) / (around[-1] - around[0]) if len(around) > 1 else 0.0
    return (1.0 - nearness) * seconds[0] + nearness * seconds[-1]


def ranks_half_width(measured: Collection[int], ranks: int) -> float:
    """Return the relative half-width that other numbers of ranks than the measured ones add."""
    if not measured or ranks in measured:
        return 0.0
    return BETWEEN_HALF_WIDTH if min(measured) < ranks < max(measured) else BEYOND_HALF_WIDTH


def _ring_s(table: Table, measured: int, ranks: int, moved_bytes: float) -> float:
    empty = table[0][1]
    moving = max(0.0, value_at(table, moved_bytes) - empty)
    turns = (ranks - 1) / (measured - 1)
    return turns * (empty + moving * measured / ranks)
