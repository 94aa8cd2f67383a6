"""`dense`: every replica adds the full gradients of all others, in the order of the ranks.

Two replicas use all-reduce: the sum of two numbers does not depend on their order, so the result is the same
bits whoever is first. More replicas use a reduce-scatter in the order of the ranks, then an all-gather. The
shares of the sum have the same bits as the sum.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from weft.sync.collectives import all_gather, reduce_scatter


class Dense:
    """Sum over replicas of a flat gradient whose length is a multiple of the number of replicas."""

    def reduce(self, gradient: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Replace `gradient` (shape (n,), contiguous) by the sum over the group; blocks until done."""
        if dist.get_world_size(group) == 2:
            dist.all_reduce(gradient, group=group)
        else:
            all_gather(gradient, reduce_scatter(gradient, group), group)

    def reduce_scatter(self, gradient: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """This rank's share of the sum over the group, shape (n / replicas,); blocks until done."""
        return reduce_scatter(gradient, group)
