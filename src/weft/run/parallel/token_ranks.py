"""`TokenRanks`: the ranks of a replica that divide the tokens of a micro-batch, each with whole layers."""

from __future__ import annotations

from typing import Any

import torch

from weft.run.parallel.function import Function
from weft.run.parallel.replica_ranks import ReplicaRanks

# Values are (samples, tokens, ...).
_TOKENS = 1


class TokenRanks(ReplicaRanks):
    """Ranks with tokens of their own, seen from one of them; subclasses say which. One rank has all."""

    name = "token"

    def own_tokens(
        self, whole: torch.Tensor, dimension: int = _TOKENS, place: int | None = None
    ) -> torch.Tensor:
        """Return the tokens of a rank, by default this one, from a value with all tokens."""
        return whole

    def joined(self, shares: torch.Tensor, dimension: int = _TOKENS) -> torch.Tensor:
        """Return all tokens in order, from all ranks' shares (size, ...); `dimension` counts in one share."""
        return shares[0]

    def all_tokens(self, own: torch.Tensor) -> torch.Tensor:
        """Return all tokens of a value (b, own tokens, ...), for computations that every rank repeats."""
        whole: torch.Tensor = _AllTokens.apply(own, self) if self.size > 1 else own
        return whole

    def mean(self, total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' totals (scalars) over the sum of their counts, the same on all."""
        mean: torch.Tensor = _Mean.apply(total, count, self)
        return mean


class _AllTokens(Function):
    """A gather for equal computations on all ranks: as gradients are equal, each takes its tokens' part."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, ranks: TokenRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return ranks.joined(ranks.gather(own))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ranks: TokenRanks = ctx.ranks
        return ranks.own_tokens(gradient), None


class _Mean(Function):
    """A mean that exchanges totals and counts at once; backward needs the count alone and no exchange."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, count: torch.Tensor, ranks: TokenRanks) -> torch.Tensor:
        totals, counts = ranks.gather(torch.stack([total.double(), count.double()])).sum(0)
        # Save no tensor: a layer that runs again for its saved tensors ends before the exchange.
        ctx.count = counts.item()
        mean: torch.Tensor = (totals / counts).to(total.dtype)
        return mean

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        count: float = ctx.count
        return gradient / count, None, None
