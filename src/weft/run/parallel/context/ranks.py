"""`ContextRanks`: the ranks that divide the tokens of every sample.

Every rank has the same weights (all of the stage's, or one tensor rank's share) and computes its own tokens.
Only attention reads other tokens (`weft.run.parallel.context.attention`). A sample has 2c chunks; rank r of c
has the chunks r and 2c - 1 - r. So with causal attention all ranks have the same work (Llama 3, arXiv
2407.21783, section 3.3.2).
"""

from __future__ import annotations

import torch

from weft.run.parallel.token_ranks import TokenRanks

# Values are (samples, tokens, ...).
_TOKENS = 1


class ContextRanks(TokenRanks):
    """The ranks of one replica of a stage that divide the tokens, seen from one of them."""

    name = "context"

    def own_tokens(
        self, whole: torch.Tensor, dimension: int = _TOKENS, place: int | None = None
    ) -> torch.Tensor:
        if self.size == 1:
            return whole
        place = self.place if place is None else place
        chunks = whole.chunk(2 * self.size, dimension)
        return torch.cat([chunks[place], chunks[-1 - place]], dimension)

    def joined(self, shares: torch.Tensor, dimension: int = _TOKENS) -> torch.Tensor:
        halves = [share.chunk(2, dimension) for share in shares]
        return torch.cat([*(one for one, _ in halves), *(one for _, one in reversed(halves))], dimension)
