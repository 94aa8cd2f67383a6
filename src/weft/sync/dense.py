"""`dense`: every replica adds the full gradients of all others, in the order of the ranks.

Two replicas use all-reduce: the sum of two numbers does not depend on their order, so the result is the same
bits whoever is first. More replicas use a reduce-scatter in the order of the ranks, then an all-gather. The
shares of the sum have the same bits as the sum.
"""

from __future__ import annotations

import torch

from weft.sync.base import Meeting
from weft.sync.collectives import add_up, reduce_scatter


class Dense:
    """Sum over replicas of a flat gradient whose length is a multiple of the number of replicas."""

    def reduce(self, gradient: torch.Tensor, meeting: Meeting) -> None:
        """Replace `gradient` (shape (n,), contiguous) by the sum over the group."""
        add_up(gradient, meeting.group)

    def reduce_scatter(self, gradient: torch.Tensor, meeting: Meeting) -> torch.Tensor:
        """This rank's share of the sum over the group, shape (n / replicas,)."""
        return reduce_scatter(gradient, meeting.group)
