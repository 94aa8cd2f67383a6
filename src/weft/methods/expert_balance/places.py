"""The places of experts on the ranks that divide them, and exchanges that make the ranks' tokens more equal.

Each rank has equally many slots. An exchange swaps the experts of one slot of two ranks. So replicas that
share out the states of a rank each exchange the range that they have.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.program.arrays import Floats, Ints


class Swap(NamedTuple):
    """Two ranks that swap the experts of one slot."""

    slot: int
    rank: int
    other: int


def first_places(mixtures: int, experts: int, ranks: int) -> Ints:
    """Return the expert of each slot of a new stage: (mixtures, ranks, slots)."""
    return np.tile(np.arange(experts, dtype=np.int64).reshape(ranks, -1), (mixtures, 1, 1))


def busiest(loads: Floats, places: Ints) -> float:
    """Return the tokens of the busiest rank over the mean of all ranks; 1 without tokens.

    Args:
        loads: tokens of each expert, (experts,).
        places: (ranks, slots).
    """
    of_rank = loads[places].sum(axis=1)
    return float(of_rank.max() / of_rank.mean()) if of_rank.any() else 1.0


def swaps(loads: Floats, places: Ints) -> list[Swap]:
    """Return exchanges, one after the other, of which each leaves the two ranks fewer tokens at most.

    Every exchange is one of the busiest rank: the one after which the busier of both ranks has fewest tokens.
    It ends where no exchange helps.
    """
    places, found = places.copy(), list[Swap]()
    while True:
        tokens = loads[places]
        of_rank = tokens.sum(axis=1)
        rank = int(of_rank.argmax())
        # Tokens that leave the busiest rank for each other rank, by slot: (ranks, slots).
        leaving = tokens[rank] - tokens
        after = np.maximum(of_rank[rank] - leaving, of_rank[:, None] + leaving)
        other, slot = np.unravel_index(after.argmin(), after.shape)
        if after[other, slot] >= of_rank[rank]:
            return found
        found.append(Swap(int(slot), rank, int(other)))
        swap(places, found[-1])


def swap(places: Ints, one: Swap) -> None:
    """Exchange the experts of one slot of two ranks, in place."""
    places[[one.rank, one.other], one.slot] = places[[one.other, one.rank], one.slot]
