"""`dense`: every replica adds the full gradients of all others, in the order of the ranks.

Two replicas use all-reduce: the sum of two numbers does not depend on their order, so the result is the same
bits whoever is first. More replicas use a reduce-scatter made of all-to-all and a local sum in rank order,
then an all-gather: a ring would add each piece in an order that starts at another rank, and gloo's own
reduce-scatter moves twice the bytes of the formula.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


class Dense:
    """Sum over replicas of a flat gradient whose length is a multiple of the number of replicas."""

    def reduce(self, gradient: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Replace `gradient` (shape (n,), contiguous) by the sum over the group; blocks until done."""
        replicas = dist.get_world_size(group)
        if replicas == 2:
            dist.all_reduce(gradient, group=group)
            return
        pieces = torch.empty_like(gradient)
        dist.all_to_all_single(pieces, gradient, group=group)
        shares = pieces.view(replicas, -1)
        total = shares[0].clone()
        for share in shares[1:]:
            total += share
        dist.all_gather(list(gradient.view(replicas, -1).unbind()), total, group=group)
