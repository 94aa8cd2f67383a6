"""`ReplicaGrid`: the division of a stage's layers, tokens and samples over the ranks of one replica."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

Groups = tuple[tuple[int, ...], ...]


class ReplicaGrid(NamedTuple):
    """Degrees of the axes inside one replica, innermost first: ranks along the first axis are neighbours.

    Attributes:
        tensor: number of ranks that divide the layers.
        context: number of ranks that divide the tokens of a sample.
        expert: number of ranks that divide the experts of mixtures, and the samples of a micro-batch.
    """

    tensor: int = 1
    context: int = 1
    expert: int = 1

    @property
    def ranks(self) -> int:
        return prod(self)

    def shares(self, place: int) -> tuple[tuple[int, int], ...]:
        """Return for each axis (shard index, number of shards) of the rank at a place in its replica."""
        return tuple((place // prod(self[:axis]) % size, size) for axis, size in enumerate(self))

    def groups(self, ranks: Sequence[int]) -> tuple[Groups, ...]:
        """Return for each axis the groups of a replica's ranks, in order, that differ only along it."""
        return tuple(self._along(axis, ranks) for axis in range(len(self)))

    def tensor_groups(self, ranks: Sequence[int]) -> Groups:
        """Return the groups of a replica's ranks that divide layers, by their place in the tokens."""
        return self._along(0, ranks)

    def context_groups(self, ranks: Sequence[int]) -> Groups:
        """Return the groups of a replica's ranks that divide tokens, by their shard of the layers."""
        return self._along(1, ranks)

    def expert_groups(self, ranks: Sequence[int]) -> Groups:
        """Return the groups of a replica's ranks that divide experts."""
        return self._along(2, ranks)

    def _along(self, axis: int, ranks: Sequence[int]) -> Groups:
        step = prod(self[:axis])
        span = step * self[axis]
        starts = (start for block in range(0, len(ranks), span) for start in range(block, block + step))
        return tuple(tuple(ranks[start : start + span : step]) for start in starts)
