"""`DividedTokens`: what a last stage gives of the tokens of one context rank.

A mean over tokens needs two numbers of the other ranks: their totals and their counts, which differ where
targets are masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional

from weft.run.context_parallel import ContextRanks
from weft.run.divided_logits import IGNORED


@dataclass(frozen=True, slots=True)
class DividedTokens:
    """Logits of all tokens, of which this rank has `own` (b, own tokens, vocabulary)."""

    # What a loss says that takes them.
    declared: ClassVar[str] = "takes_divided_tokens"

    own: torch.Tensor
    ranks: ContextRanks

    def cross_entropy(self, targets: torch.Tensor, ignored: int = IGNORED) -> torch.Tensor:
        """Mean over the targets (b, all tokens) that are not `ignored`; the same number on all ranks."""
        own = self.ranks.own_tokens(targets).flatten()
        logits = self.own.flatten(0, -2)
        total = functional.cross_entropy(logits, own, ignore_index=ignored, reduction="sum")
        return self.ranks.mean(total, (own != ignored).sum())

    def own_targets(self, targets: torch.Tensor) -> torch.Tensor:
        """Of targets (b, all tokens, ...) those of the own tokens."""
        return self.ranks.own_tokens(targets)

    def mean(self, total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """The mean of a loss of which this rank has the sum over `count` targets; the same on all ranks."""
        return self.ranks.mean(total, count)

    def detach(self) -> DividedTokens:
        """Without what gradients need."""
        return DividedTokens(self.own.detach(), self.ranks)

    def argmax(self) -> torch.Tensor:
        """The class of the largest logit, shape (b, all tokens)."""
        return self.ranks.joined(self.ranks.gather(self.own.detach().argmax(-1)))

    def whole(self) -> torch.Tensor:
        """All logits, for a loss that every rank computes in full; gradients flow to the own tokens."""
        return self.ranks.all_tokens(self.own)
