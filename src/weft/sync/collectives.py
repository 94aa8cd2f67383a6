"""Collectives over host memory that hold little beside what they are given."""

from __future__ import annotations

import torch
import torch.distributed as dist

# Elements of a flat tensor that are exchanged at once: they bound the memory, stay in the cache until they
# are added up, and are many enough for a message each.
PIECE_ELEMENTS = 2**20

# torch has renamed it, and warns of the former name.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's share, shape (n / ranks,), of the sum of `flat` over the group, in the order of the ranks.

    `flat` has shape (n,), is contiguous and stays as it is; n is a multiple of the number of ranks. Made of
    all-to-all and a local sum: a ring would add each piece in an order that starts at another rank, and
    gloo's own reduce-scatter moves twice the bytes of the formula.
    """
    ranks = dist.get_world_size(group)
    shares = flat.view(ranks, len(flat) // ranks)
    total, length = torch.empty_like(shares[0]), -(-PIECE_ELEMENTS // ranks)
    for start in range(0, len(total), length):
        given = shares[:, start : start + length].contiguous()
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken.view(-1), given.view(-1), group=group)
        piece = total[start : start + length]
        piece.copy_(taken[0])
        for addend in taken[1:]:
            piece += addend
    return total


def all_gather(flat: torch.Tensor, share: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill `flat`, shape (n,), with the shares of all ranks, shape (n / ranks,), in their order."""
    _all_gather_flat(flat, share, group=group)
