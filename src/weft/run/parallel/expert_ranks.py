"""`ExpertRanks`: the ranks that divide the experts of every mixture, and the samples of every micro-batch.

Every rank has all weights but those of experts, and the experts of its share. Rows of tokens go to the ranks
of their experts and come back (Lepikhin et al., GShard, arXiv 2006.16668, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from weft.run.parallel.function import Function
from weft.run.parallel.permutation import inverse, permuted
from weft.run.parallel.token_ranks import TokenRanks

_SAMPLES = 0


class ExpertRanks(TokenRanks):
    """The ranks of one replica of a stage that divide experts and samples, seen from one of them."""

    name = "expert"

    def own_tokens(self, whole: torch.Tensor, dimension: int = 1, place: int | None = None) -> torch.Tensor:
        """Return the samples of a rank, by default this one; `dimension` is of no matter."""
        return whole.chunk(self.size, _SAMPLES)[self.place if place is None else place]

    def joined(self, shares: torch.Tensor, dimension: int = 1) -> torch.Tensor:
        return shares.flatten(0, 1)

    def dispatch(self, rows: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, Dispatch]:
        """Send rows (pairs, hidden), sorted by expert, to the ranks of their experts.

        Args:
            counts: rows of each expert, (experts,).

        Returns:
            The rows for this rank's experts, sorted by expert and then by sender, and the route back.
        """
        of_all = self.gather(counts)
        own = of_all.chunk(self.size, 1)[self.place]
        expert = torch.arange(own.shape[1], device=own.device).repeat(self.size)
        order = torch.argsort(expert.repeat_interleave(own.flatten()), stable=True)
        # The host needs the sizes of all sends.
        given, taken = (one.tolist() for one in (counts.view(self.size, -1).sum(1), own.sum(1)))
        route = Dispatch(self, given, taken, own.sum(0), order, inverse(order))
        return route.there(rows), route


class Dispatch(NamedTuple):
    """The way of a micro-batch's rows to their experts and back.

    Attributes:
        given, taken: rows to each rank, and from each.
        counts: rows of all ranks for each of this rank's experts, (own experts,).
        order, place: positions of received rows in the order of experts, and the inverse, (received,).
    """

    ranks: ExpertRanks
    given: Sequence[int]
    taken: Sequence[int]
    counts: torch.Tensor
    order: torch.Tensor
    place: torch.Tensor

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows that all ranks have for this rank's experts, sorted by expert."""
        received: torch.Tensor = _Exchange.apply(rows, self.ranks, self.given, self.taken)
        return permuted(received, self.order, self.place)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the results of this rank's own rows, in their first order."""
        by_sender = permuted(rows, self.place, self.order)
        returned: torch.Tensor = _Exchange.apply(by_sender, self.ranks, self.taken, self.given)
        return returned


class _Exchange(Function):
    """Rows to other ranks; their gradients go back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, ranks: ExpertRanks, given: Sequence[int], taken: Sequence[int]
    ) -> torch.Tensor:
        ctx.ranks, ctx.given, ctx.taken = ranks, given, taken
        return _exchanged(rows, ranks, given, taken)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchanged(gradient, ctx.ranks, ctx.taken, ctx.given), None, None, None


def _exchanged(
    rows: torch.Tensor, ranks: ExpertRanks, given: Sequence[int], taken: Sequence[int]
) -> torch.Tensor:
    received = rows.new_empty(sum(taken), rows.shape[1])
    with ranks.meeting():
        ranks.group.all_to_all_rows(received, rows.contiguous(), taken, given)
    return received
