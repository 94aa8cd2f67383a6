"""Signs in {-1, 0, 1}: drawn at random, and packed four to a byte."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from weft.sync.base import Group
from weft.sync.codecs.counter import Key, uniforms

# Signs in one byte, each in two bits.
SIGNS_PER_BYTE = 4
# The code of no number; those of signs are 0, 1 and 2.
_NO_NUMBER = 3.0


def signs_of(direction: torch.Tensor) -> torch.Tensor:
    """Return the signs of numbers, 0 for 0; one that is no number stays none, unlike torch's own sign."""
    return torch.where(direction.isnan(), direction, direction.sign())


def packed(signs: torch.Tensor) -> torch.Tensor:
    """Return signs, shape (n,), as bytes, shape (n / 4,); one that is no number stays none."""
    codes = (signs + 1).nan_to_num_(nan=_NO_NUMBER).to(torch.uint8).view(-1, SIGNS_PER_BYTE)
    return (codes << _shifts(codes)).sum(1, dtype=torch.uint8)


def unpacked(given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the signs, shape (n,), in bytes of shape (n / 4,)."""
    codes = ((given.unsqueeze(1) >> _shifts(given)) & 3).view(-1).to(dtype)
    return codes.masked_fill_(codes == _NO_NUMBER, torch.nan).sub_(1)


def _shifts(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(0, 8, 8 // SIGNS_PER_BYTE, dtype=torch.uint8, device=like.device)


class SlicePiece(NamedTuple):
    """The elements `start` to `end` of a parameter that lie in a rank's slice from `place` on."""

    name: str
    number: int
    start: int
    end: int
    place: int


class SlicePieces:
    """The pieces of parameters in a rank's slice of the flat weights.

    Args:
        parts: lengths of all parameters by name, in their order.
        length: that of each slice.
        place: the number of this rank's slice.
    """

    def __init__(self, parts: Mapping[str, int], length: int, place: int) -> None:
        self.parameters = len(parts)
        self.own: list[SlicePiece] = []
        begins, first = 0, place * length
        for index, (name, elements) in enumerate(parts.items()):
            start, end = max(first - begins, 0), min(first + length - begins, elements)
            if start < end:
                self.own.append(SlicePiece(name, index, start, end, begins + start - first))
            begins += elements


def random_signs(
    direction: torch.Tensor, pieces: SlicePieces, group: Group, seed: int, number: int
) -> torch.Tensor:
    """Return random signs with the mean `direction / largest`, shape (n,).

    The largest magnitude is that of each parameter, over all ranks of the group. The sign of u stays with the
    probability 1/2 + |u| / (2 largest), and is flipped otherwise. The number drawn for an element depends
    on seed, round `number`, its parameter's name and its place there. So two plans draw the same, and
    so do copies of one weight in several stages.
    """
    largest = direction.new_zeros(group.size * pieces.parameters)
    own = direction.new_zeros(pieces.parameters)
    for one in pieces.own:
        own[one.number] = _of(direction, one).abs().max()
    group.all_gather(largest, own)
    bounds = largest.view(group.size, -1).amax(0)
    signs = signs_of(direction)
    for one in pieces.own:
        stays = 0.5 + _of(direction, one).abs() / (2.0 * bounds[one.number])
        key = Key.of(seed, "sign", number, one.name)
        drawn = uniforms(key, one.start, one.end - one.start, direction.device)
        _of(signs, one).mul_(torch.where(drawn < stays, 1.0, -1.0))
    return signs


def _of(flat: torch.Tensor, piece: SlicePiece) -> torch.Tensor:
    return flat[piece.place : piece.place + piece.end - piece.start]
