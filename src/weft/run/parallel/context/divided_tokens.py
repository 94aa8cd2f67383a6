"""`DividedTokens`: a last stage's output for the tokens of one rank.

A mean over tokens needs two numbers of the other ranks: their totals and their counts. Counts differ if
targets are masked. If tensor ranks also divide the vocabulary, they compute the total together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.nn import functional

from weft.run.parallel.divided_logits import IGNORED, DividedLogits
from weft.run.parallel.token_ranks import TokenRanks
from weft.run.parallel.unmade_logits import UnmadeLogits


@dataclass(frozen=True, slots=True)
class DividedTokens:
    """Logits of all tokens, of which this rank has its own tokens' as `share`.

    They are (b, own tokens, vocabulary), columns of these, or those that a loss kernel makes.
    """

    # The attribute of a loss function that takes them.
    declared: ClassVar[str] = "takes_divided_tokens"

    share: torch.Tensor | DividedLogits | UnmadeLogits
    ranks: TokenRanks

    @property
    def own(self) -> torch.Tensor:
        """The logits of the own tokens (b, own tokens, vocabulary); tensor ranks gather them for it."""
        share = self._made
        return share.whole() if isinstance(share, DividedLogits) else share

    @property
    def _made(self) -> torch.Tensor | DividedLogits:
        """The logits, which only functions that take unmade ones may leave to a kernel."""
        assert not isinstance(self.share, UnmadeLogits), "a loss of whole logits is refused with a kernel"
        return self.share

    def cross_entropy(self, targets: torch.Tensor, ignored: int = IGNORED) -> torch.Tensor:
        """Return the mean over the targets (b, all tokens) that are not `ignored`, the same on all ranks."""
        own = self.ranks.own_tokens(targets).flatten()
        if isinstance(self.share, torch.Tensor):
            logits = self.share.flatten(0, -2)
            total = functional.cross_entropy(logits, own, ignore_index=ignored, reduction="sum")
        else:
            total = self.share.total_cross_entropy(own, ignored)
        return self.ranks.mean(total, (own != ignored).sum())

    def own_targets(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the own tokens' part of targets (b, all tokens, ...)."""
        return self.ranks.own_tokens(targets)

    def mean(self, total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Return the mean of a loss from this rank's sum over `count` targets, the same on all ranks."""
        return self.ranks.mean(total, count)

    def detach(self) -> DividedTokens:
        """Return the logits cut from the autograd graph."""
        return DividedTokens(self.share.detach(), self.ranks)

    def argmax(self) -> torch.Tensor:
        """Return the class of the largest logit, shape (b, all tokens)."""
        share = self.share.detach()
        own = share.argmax(-1) if isinstance(share, torch.Tensor) else share.argmax()
        return self.ranks.joined(self.ranks.gather(own))

    def with_all_tokens(self) -> torch.Tensor | DividedLogits:
        """Return the logits of all tokens, or their own columns; gradients flow to the own tokens."""
        share = self._made
        if isinstance(share, DividedLogits):
            return replace(share, own=self.ranks.all_tokens(share.own))
        return self.ranks.all_tokens(share)

    def whole(self) -> torch.Tensor:
        """Return all logits, for a loss that every rank computes; gradients flow to the own tokens."""
        logits = self.with_all_tokens()
        return logits.whole() if isinstance(logits, DividedLogits) else logits
