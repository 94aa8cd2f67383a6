"""`ReplicaGrid`: how the ranks of one replica of a stage divide its layers and its tokens among them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

Groups = tuple[tuple[int, ...], ...]


class ReplicaGrid(NamedTuple):
    """Degrees of the axes inside one replica, innermost first: ranks along the first axis are neighbours.

    Attributes:
        tensor: how many ranks divide the layers.
        context: how many ranks divide the tokens of a sample.
    """

    tensor: int = 1
    context: int = 1

    @property
    def ranks(self) -> int:
        return prod(self)

    def shares(self, place: int) -> tuple[tuple[int, int], ...]:
        """By axis which share of how many the rank at a place in its replica has."""
        return tuple((place // prod(self[:axis]) % size, size) for axis, size in enumerate(self))

    def groups(self, ranks: Sequence[int]) -> tuple[Groups, ...]:
        """By axis those of a replica's ranks, in order, whose shares differ along it alone."""
        return tuple(self._along(axis, ranks) for axis in range(len(self)))

    def tensor_groups(self, ranks: Sequence[int]) -> Groups:
        """Of a replica's ranks those that divide layers among them, by their place in the tokens."""
        return self._along(0, ranks)

    def context_groups(self, ranks: Sequence[int]) -> Groups:
        """Of a replica's ranks those that divide tokens among them, by their share of the layers."""
        return self._along(1, ranks)

    def _along(self, axis: int, ranks: Sequence[int]) -> Groups:
        step = prod(self[:axis])
        span = step * self[axis]
        starts = (start for block in range(0, len(ranks), span) for start in range(block, block + step))
        return tuple(tuple(ranks[start : start + span : step]) for start in starts)
