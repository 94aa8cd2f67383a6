"""`ContextRanks`: the ranks that divide the tokens of every sample.

Every rank has the same weights, all of the stage's or the same tensor rank's share, and computes its own
tokens. Attention alone reads other tokens (`weft.run.parallel.context.attention`). Of 2c chunks of a sample,
rank r of c has the chunks r and 2c - 1 - r, so that with causal attention all ranks have the same work
(Llama 3, arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

from typing import Any

import torch

from weft.run.parallel.function import Function
from weft.run.parallel.replica_ranks import ReplicaRanks

# Values are (samples, tokens, ...).
_TOKENS = 1


class ContextRanks(ReplicaRanks):
    """The ranks of one replica of a stage that divide the tokens, seen from one of them."""

    name = "context"

    def own_tokens(
        self, whole: torch.Tensor, dimension: int = _TOKENS, place: int | None = None
    ) -> torch.Tensor:
        """Return the tokens of a rank, by default this one, of a value with all of them."""
        if self.size == 1:
            return whole
        place = self.place if place is None else place
        chunks = whole.chunk(2 * self.size, dimension)
        return torch.cat([chunks[place], chunks[-1 - place]], dimension)

    def joined(self, shares: torch.Tensor, dimension: int = _TOKENS) -> torch.Tensor:
        """All tokens in their order out of those of all ranks, (size, ...); `dimension` is a share's own."""
        halves = [share.chunk(2, dimension) for share in shares]
        return torch.cat([*(one for one, _ in halves), *(one for _, one in reversed(halves))], dimension)

    def all_tokens(self, own: torch.Tensor) -> torch.Tensor:
        """Return all tokens of a value (b, own tokens, ...), for what every rank then computes in full."""
        whole: torch.Tensor = _AllTokens.apply(own, self) if self.size > 1 else own
        return whole

    def mean(self, total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Return all ranks' totals, scalars, together over all their counts; the same number on all."""
        mean: torch.Tensor = _Mean.apply(total, count, self)
        return mean


class _AllTokens(Function):
    """What follows is the same on every rank, and so is its gradient: each takes the part of its tokens."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, ranks: ContextRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return ranks.joined(ranks.gather(own))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ranks: ContextRanks = ctx.ranks
        return ranks.own_tokens(gradient), None


class _Mean(Function):
    """Totals and counts are exchanged at once; backward a rank knows the count and needs no other."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, count: torch.Tensor, ranks: ContextRanks) -> torch.Tensor:
        totals, counts = ranks.gather(torch.stack([total.double(), count.double()])).sum(0)
        # No saved tensor: a layer that is run again for its saved tensors ends before the exchange.
        ctx.count = counts.item()
        mean: torch.Tensor = (totals / counts).to(total.dtype)
        return mean

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        count: float = ctx.count
        return gradient / count, None, None
