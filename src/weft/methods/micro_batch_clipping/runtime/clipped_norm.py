"""`ClippedNorm`: the norms of micro-batches over the stages of a rank that share them, and their sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from weft.methods.micro_batch_clipping.options import ClipTable
from weft.methods.micro_batch_clipping.runtime.clipped_sum import ClippedSum
from weft.program.arrays import Ints
from weft.sync.base import Group


class TakenGradient(NamedTuple):
    """The gradient of a clipped micro-batch in one stage, (n,), and the squares that its rank counts, ()."""

    gradient: torch.Tensor
    squares: torch.Tensor


class ClippedNorm:
    """The norms of all clipped micro-batches of a step, on one rank.

    Args:
        count: the clipped micro-batches of the global batch.
        first: the number of the replica's first one.
        stages: those of the rank whose gradients have the norm together.
        leads: True on one of the ranks that have the norm.
    """

    def __init__(
        self, table: ClipTable, count: int, first: int, stages: tuple[int, ...], *, leads: bool
    ) -> None:
        self._table, self._first, self.stages, self.leads = table, first, stages, leads
        self._norms = torch.zeros(count, dtype=torch.float64)
        self._gradients: Sequence[torch.Tensor] = ()
        self._sum: ClippedSum | None = None

    @property
    def sum(self) -> ClippedSum:
        assert self._sum is not None, "a norm begins before it clips"
        return self._sum

    def begin(self, gradients: Sequence[torch.Tensor]) -> None:
        """Take the gradients of the stages, each (n,)."""
        self._gradients = gradients
        self._norms = self._norms.to(gradients[0].device)
        self._sum = ClippedSum(self._table, len(self._norms), gradients)

    def add(
        self,
        sources: Ints,
        part: int,
        taken: Sequence[TakenGradient],
        group: Group,
        loss_factor: float | torch.Tensor,
    ) -> None:
        """Add the clipped gradients of a micro-batch, one for each of `stages`, to the sum.

        Every rank of the group calls it. `sources` are those of all clipped micro-batches.
        """
        squares = torch.stack([one.squares for one in taken]).sum()
        if group.size > 1:
            group.all_reduce(squares)
        number = self._first + part
        norm = self.sum.add([one.gradient for one in taken], squares, loss_factor, int(sources[number]))
        # One rank of the replica tells the norm.
        if group.place == 0:
            self._norms[number] = norm

    def finish(self, sources: Ints, group: Group) -> dict[str, torch.Tensor]:
        """Put the bounded sum into the gradients, and return the step's numbers.

        Every rank with a part of the gradient calls it.
        """
        norms, self._norms = self._norms, torch.zeros_like(self._norms)
        if group.size > 1:
            group.all_reduce(norms)
        return self.sum.finish(norms, torch.from_numpy(sources).to(norms.device), self._gradients)
