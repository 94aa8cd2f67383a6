"""`dense`: every replica adds the full gradients of all replicas, in rank order.

Two replicas use all-reduce: the sum of two numbers does not depend on their order. More replicas use a
reduce-scatter in rank order, then an all-gather. The shares of the sum have the same bits as the sum.
"""

from __future__ import annotations

import torch

from weft.sync.base import Meeting
from weft.sync.collectives import add_up, reduce_scatter


class Dense:
    """Sum over replicas of a flat gradient; its length is a multiple of the number of replicas."""

    def reduce(self, gradient: torch.Tensor, meeting: Meeting) -> None:
        """Replace `gradient`, shape (n,), contiguous, by the sum over the group."""
        add_up(gradient, meeting.group)

    def reduce_scatter(self, gradient: torch.Tensor, meeting: Meeting) -> torch.Tensor:
        """Return this rank's share, shape (n / replicas,), of the sum over the group."""
        return reduce_scatter(gradient, meeting.group)
