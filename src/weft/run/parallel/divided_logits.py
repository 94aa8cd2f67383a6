"""`DividedLogits`: logits that tensor ranks divide, each with the columns of its share of the vocabulary.

Their cross entropy needs other ranks' largest logit, sum of exponentials and target's logit, three numbers
per target (Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

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


class ShareOfSoftmax(NamedTuple):
    """The softmax of logits (targets, columns) over the vocabulary, on a rank that may have a share of it.

    Attributes:
        exponentials: of the logits less the largest of all ranks, (targets, columns).
        sums: of all ranks' exponentials, (targets,).
        losses: cross entropy, 0 at ignored targets, (targets,).
        column: the target's column, 0 where another rank has it, (targets, 1).
        here, asked: True where this rank has the target's column, and where the target counts, (targets,).
    """

    exponentials: torch.Tensor
    sums: torch.Tensor
    losses: torch.Tensor
    column: torch.Tensor
    here: torch.Tensor
    asked: torch.Tensor

    def gradient_in_place(self) -> torch.Tensor:
        """Return the gradient of the sum of losses for the logits; it takes the exponentials' place."""
        gradient = self.exponentials.div_(torch.where(self.asked, self.sums, torch.inf).unsqueeze(1))
        target = (self.here & self.asked).to(gradient.dtype)
        return gradient.scatter_add_(1, self.column, -target.unsqueeze(1))


def softmax_of_share(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignored: int,
    ranks: TensorRanks,
    share: range,
    *,
    room: torch.Tensor | None = None,
) -> ShareOfSoftmax:
    """Return the softmax of logits (targets, columns of `share`).

    `room`: a tensor of their shape, in the precision of the result, that may be the logits; None makes one.
    """
    largest = logits.amax(1)
    if ranks.size > 1:
        largest = ranks.largest(largest)
    shifted = (torch.empty_like(logits) if room is None else room).copy_(logits).sub_(largest.unsqueeze(1))
    here = (targets >= share.start) & (targets < share.stop)
    column = torch.where(here, targets - share.start, 0).unsqueeze(1)
    target_logits = torch.where(here, shifted.gather(1, column).squeeze(1), 0.0)
    exponentials = shifted.exp_()
    sums = exponentials.sum(1)
    if ranks.size > 1:
        sums, target_logits = ranks.add_up(torch.stack([sums, target_logits]))
    asked = targets != ignored
    losses = torch.where(asked, sums.log() - target_logits, 0.0)
    return ShareOfSoftmax(exponentials, sums, losses, column, here, asked)


class _TotalCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, targets: torch.Tensor, ignored: int, ranks: TensorRanks, share: range
    ) -> torch.Tensor:
        """Sum the cross entropy of logits (targets, columns of `share`)."""
        found = softmax_of_share(own, targets, ignored, ranks, share)
        probabilities = found.exponentials.div_(found.sums.unsqueeze(1))
        ctx.save_for_backward(probabilities, found.column, found.here, found.asked)
        return found.losses.sum()

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
