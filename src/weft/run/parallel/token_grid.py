"""`TokenGrid`: the ranks of a replica that divide both the samples of a micro-batch and their tokens."""

from __future__ import annotations

import torch

from weft.run.parallel.context.ranks import ContextRanks
from weft.run.parallel.expert_ranks import ExpertRanks
from weft.run.parallel.token_ranks import TokenRanks


class TokenGrid(TokenRanks):
    """Expert ranks times context ranks, seen from one of them; context ranks are neighbours.

    It exchanges along one axis after the other, over the groups to which they are connected.
    """

    def __init__(self, expert: ExpertRanks, context: ContextRanks) -> None:
        super().__init__(expert.place * context.size + context.place, expert.size * context.size)
        self.expert = expert
        self.context = context

    def own_tokens(self, whole: torch.Tensor, dimension: int = 1, place: int | None = None) -> torch.Tensor:
        """Return the tokens of a rank's samples; `dimension` is that of tokens."""
        samples, tokens = divmod(self.place if place is None else place, self.context.size)
        return self.context.own_tokens(self.expert.own_tokens(whole, place=samples), dimension, tokens)

    def joined(self, shares: torch.Tensor, dimension: int = 1) -> torch.Tensor:
        by_samples = shares.unflatten(0, (self.expert.size, self.context.size))
        whole = torch.stack([self.context.joined(one, dimension) for one in by_samples])
        return self.expert.joined(whole)

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        return self.expert.gather(self.context.gather(value)).flatten(0, 1)
