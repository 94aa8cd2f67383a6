"""The geometry of pieces: ranges of a stage's flat gradient, cut into equal shares of whole blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class CompressedRange(NamedTuple):
    """A range of a stage's flat gradient, and the place of its first element in its piece."""

    flat: slice
    place: int

    @property
    def own(self) -> slice:
        return slice(self.place, self.place + self.flat.stop - self.flat.start)


class GradientPiece(NamedTuple):
    """A piece of a stage's gradient: its ranges, its elements, and the blocks of each rank's share."""

    ranges: tuple[CompressedRange, ...]
    elements: int
    blocks: int

    @classmethod
    def of(
        cls, elements: int, block: int, shares: int, ranges: tuple[CompressedRange, ...] = ()
    ) -> GradientPiece:
        """Return a piece with whole blocks in equal shares; a server knows no ranges."""
        return cls(ranges, elements, -(-elements // (block * shares)))

    def elements_of(self, place: int, block: int) -> int:
        """Return the elements of a share; zeros fill its blocks."""
        length = self.blocks * block
        return min(max(self.elements - place * length, 0), length)

    def owned_ranges(self, place: int, block: int) -> list[CompressedRange]:
        """Return the ranges of a share, with places in the share."""
        length = self.blocks * block
        found = []
        for one in self.ranges:
            start, stop = max(one.place, place * length), min(one.own.stop, (place + 1) * length)
            if start < stop:
                shift = one.flat.start - one.place
                found.append(CompressedRange(slice(start + shift, stop + shift), start - place * length))
        return found


def pieces_of(ranges: Sequence[slice], count: int, block: int, shares: int) -> tuple[GradientPiece, ...]:
    """Cut ranges of a flat tensor into `count` pieces of about as many elements each.

    A piece has whole blocks in `shares` equal shares.
    """
    total = sum(one.stop - one.start for one in ranges)
    found = []
    for number in range(count):
        first, last = total * number // count, total * (number + 1) // count
        found.append(GradientPiece.of(last - first, block, shares, tuple(_within(ranges, first, last))))
    return tuple(found)


def _within(ranges: Sequence[slice], first: int, last: int) -> list[CompressedRange]:
    """Return the parts of the ranges, taken one behind the other, from place `first` to `last`."""
    found, begins = [], 0
    for one in ranges:
        ends = begins + one.stop - one.start
        start, end = max(first, begins), min(last, ends)
        if start < end:
            shift = one.start - begins
            found.append(CompressedRange(slice(start + shift, end + shift), start - first))
        begins = ends
    return found


def joined(ranges: Sequence[slice]) -> tuple[slice, ...]:
    """Return sorted ranges with neighbours joined to one."""
    found: list[slice] = []
    for one in ranges:
        if found and found[-1].stop == one.start:
            found[-1] = slice(found[-1].start, one.stop)
        else:
            found.append(one)
    return tuple(found)
