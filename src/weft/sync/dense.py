"""`dense`: every replica adds the full gradients of all replicas."""

from __future__ import annotations

import torch

from weft.sync.base import Meeting


class Dense:
    """Sum over replicas of a flat gradient; its length is a multiple of the number of replicas."""

    def reduce(self, gradient: torch.Tensor, meeting: Meeting) -> None:
        """Replace `gradient`, shape (n,), contiguous, by the sum over the group."""
        meeting.group.add_up(gradient)

    def reduce_scatter(self, gradient: torch.Tensor, meeting: Meeting) -> torch.Tensor:
        """Return this rank's share, shape (n / replicas,), of the sum over the group."""
        return meeting.group.reduce_scatter(gradient)


class RoundedDense(Dense):
    """The sum of gradients that replicas send each other in another precision.

    Args:
        sent_as: this precision; gradients keep their own.
    """

    def __init__(self, sent_as: torch.dtype) -> None:
        self._sent_as = sent_as

    def reduce(self, gradient: torch.Tensor, meeting: Meeting) -> None:
        meeting.group.add_up(gradient, self._sent_as)

    def reduce_scatter(self, gradient: torch.Tensor, meeting: Meeting) -> torch.Tensor:
        return meeting.group.reduce_scatter(gradient, self._sent_as)
