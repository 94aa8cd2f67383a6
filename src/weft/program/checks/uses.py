"""The uses of one value, in order, as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weft.program.arrays import Ints, Mask
from weft.program.codes import codes
from weft.program.values import Read

EACH, FIRST, LAST, _WAITS = 0, 1, 2, 3
CONSUMES = 4
# The highest flag: an instruction that reads and writes a value reads it first.
WRITES = 8
_FLAG_BITS = 4


def waits_flag(read: Read) -> int:
    """Return the flag of `Read.waits`."""
    return {"each": EACH, "first": FIRST, "last": LAST}[read.waits]


@dataclass(frozen=True)
class Uses:
    """Uses of one value; uses at the same coordinates are adjacent.

    Attributes:
        row, flag: the instruction and its use: `WRITES`, or a read's wait with `CONSUMES` for a last read.
        first, last: index of the first and the last use at the same coordinates.
        place: number of the coordinates.
    """

    row: Ints
    flag: Ints
    first: Ints
    last: Ints
    place: Ints
    _places: Ints
    _coordinates: Mapping[str, Ints]

    @classmethod
    def sort(cls, row: Ints, flag: Ints, time: Ints, coordinates: Mapping[str, Ints]) -> Uses:
        """Sort uses by coordinates, then by time, then by row.

        The sort uses one integer per use, because this is several times faster than a sort of indices.
        """
        place = codes(*coordinates.values())
        row_bits = int(row.max(initial=0)).bit_length()
        time_bits = int(time.max(initial=0)).bit_length()
        bits = _FLAG_BITS + row_bits + time_bits
        if int(place.max(initial=0)).bit_length() + bits > 62:
            place = np.unique(place, return_inverse=True)[1].astype(np.int64)
        key = (((place << time_bits | time) << row_bits | row) << _FLAG_BITS) | flag
        key.sort()
        at = key >> bits
        index = np.arange(len(key), dtype=np.int64)
        opens = np.append(True, at[1:] != at[:-1])[: len(key)]
        first = np.maximum.accumulate(np.where(opens, index, 0))
        ends = np.append(np.flatnonzero(opens)[1:], len(key)) - 1
        return cls(
            row=key >> _FLAG_BITS & (1 << row_bits) - 1,
            flag=key & (1 << _FLAG_BITS) - 1,
            first=first,
            last=ends[np.cumsum(opens) - 1],
            place=at,
            _places=place,
            _coordinates=coordinates,
        )

    @property
    def writes(self) -> Mask:
        writes: Mask = self.flag >= WRITES
        return writes

    @property
    def consumes(self) -> Mask:
        consumes: Mask = self.flag & CONSUMES != 0
        return consumes

    @property
    def waits(self) -> Ints:
        return self.flag & _WAITS

    def coordinate(self, index: int, name: str) -> int:
        """Return a coordinate of a use's value."""
        one = int(np.flatnonzero(self._places == self.place[index])[0])
        return int(self._coordinates[name][one])
