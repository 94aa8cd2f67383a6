"""Sums over a group in the order of its ranks, so that repetitions have the same bits."""

from __future__ import annotations

import torch

from weft.sync.base import Group

# Elements of a flat tensor per exchange. They bound the memory, stay in the cache until they are added up,
# and are many enough for one message each.
PIECE_ELEMENTS = 2**20


def reduce_scatter(flat: torch.Tensor, group: Group, sent_as: torch.dtype) -> torch.Tensor:
    """Return this rank's share, shape (n / ranks,), of the sum of `flat` over the group.

    All addends are rounded to `sent_as`, this rank's own, too. Their sum has the precision of `flat`.
    `flat`, shape (n,), is contiguous and stays unchanged; n is a multiple of the number of ranks. The steps
    are an all-to-all and a local sum. A ring would add each piece in an order that starts at another rank.
    The reduce-scatter of gloo moves twice the bytes of the formula.
    """
    shares = flat.view(group.size, len(flat) // group.size)
    total, length = torch.empty_like(shares[0]), -(-PIECE_ELEMENTS // group.size)
    for start in range(0, len(total), length):
        given = shares[:, start : start + length].to(sent_as).contiguous()
        taken = torch.empty_like(given)
        group.all_to_all(taken.view(-1), given.view(-1))
        piece = total[start : start + length]
        piece.copy_(taken[0])
        for addend in taken[1:]:
            piece += addend
    return total


def add_up(flat: torch.Tensor, group: Group, sent_as: torch.dtype) -> None:
    """Replace `flat`, as in `reduce_scatter`, by the sum over the group, rounded once to `sent_as`."""
    if sent_as != flat.dtype:
        share = reduce_scatter(flat, group, sent_as).to(sent_as)
        total = torch.empty_like(flat, dtype=sent_as)
        group.all_gather(total, share)
        flat.copy_(total)
    elif group.size == 2:
        # The sum of two numbers does not depend on their order.
        group.all_reduce(flat)
    else:
        group.all_gather(flat, reduce_scatter(flat, group, sent_as))
