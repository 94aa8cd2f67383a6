"""`DividedLogits`: logits that tensor ranks divide, each with the columns of its share of the vocabulary.

Their cross entropy needs other ranks' largest logit, sum of exponentials and target's logit, three numbers
per target (Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from weft.run.parallel.function import Function
from weft.run.parallel.tensor_parallel import TensorRanks

# The target that cross entropy leaves out by default, in torch and here.
IGNORED = -100


@dataclass(frozen=True, slots=True)
class DividedLogits:
    """Logits (..., vocabulary); this rank has the columns of its share, `own` (..., columns)."""

    # The attribute of a loss function that takes them.
    declared: ClassVar[str] = "takes_divided_logits"

    own: torch.Tensor
    vocabulary: int
    ranks: TensorRanks

    def cross_entropy(self, targets: torch.Tensor, ignored: int = IGNORED) -> torch.Tensor:
        """Return the mean over the targets (...) that are not `ignored`; the same number on all ranks."""
        return self.total_cross_entropy(targets, ignored) / (targets != ignored).sum()

    def total_cross_entropy(self, targets: torch.Tensor, ignored: int = IGNORED) -> torch.Tensor:
        """Return the sum over the targets (...) that are not `ignored`; the same number on all ranks."""
        share = self.ranks.share(self.vocabulary)
        total: torch.Tensor = _TotalCrossEntropy.apply(
            self.own.flatten(0, -2), targets.flatten(), ignored, self.ranks, share
        )
        return total

    def detach(self) -> DividedLogits:
        """Return the logits cut from the autograd graph."""
        return DividedLogits(self.own.detach(), self.vocabulary, self.ranks)

    def argmax(self) -> torch.Tensor:
        """Return the class of the largest logit, shape (...)."""
        value, place = self.own.detach().max(-1)
        values = self.ranks.gather(value)
        places = self.ranks.gather(place + self.ranks.share(self.vocabulary).start)
        return places.gather(0, values.argmax(0, keepdim=True)).squeeze(0)

    def whole(self) -> torch.Tensor:
        """Return all logits, for a loss that every rank computes; gradients flow to the own columns."""
        logits: torch.Tensor = _Joined.apply(self.own, self.vocabulary, self.ranks)
        return logits


class _TotalCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, targets: torch.Tensor, ignored: int, ranks: TensorRanks, share: range
    ) -> torch.Tensor:
        """Sum the cross entropy of logits (targets, columns of `share`)."""
        shifted = own - ranks.largest(own.amax(1)).unsqueeze(1)
        here = (targets >= share.start) & (targets < share.stop)
        column = torch.where(here, targets - share.start, 0).unsqueeze(1)
        target_logits = torch.where(here, shifted.gather(1, column).squeeze(1), 0.0)
        exponentials = shifted.exp_()
        sums, target_logits = ranks.add_up(torch.stack([exponentials.sum(1), target_logits]))
        asked = targets != ignored
        ctx.save_for_backward(exponentials.div_(sums.unsqueeze(1)), column, here, asked)
        return torch.where(asked, sums.log() - target_logits, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        probabilities, column, here, asked = ctx.saved_tensors
        each = torch.where(asked, gradient, 0.0).unsqueeze(1)
        logits_gradient = probabilities * each
        logits_gradient.scatter_add_(1, column, -each * here.unsqueeze(1))
        return logits_gradient, None, None, None, None


class _Joined(Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, vocabulary: int, ranks: TensorRanks) -> torch.Tensor:
        ctx.share = ranks.share(vocabulary)
        widest = -(-vocabulary // ranks.size)
        padded = torch.nn.functional.pad(own, (0, widest - own.shape[-1]))
        parts = ranks.gather(padded)
        return torch.cat([part[..., : len(ranks.share(vocabulary, i))] for i, part in enumerate(parts)], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient[..., ctx.share.start : ctx.share.stop], None, None
