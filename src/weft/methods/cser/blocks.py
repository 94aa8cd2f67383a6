"""The equal blocks of flat weights, of which replicas average a few at a time."""

from __future__ import annotations

from dataclasses import dataclass

# The most numbers of a block whose length nobody asked for.
LONGEST = 4096
# Blocks that the sparsest meeting then keeps, where the weights are enough. More of them bring the real ratio
# closer to the asked one.
_KEPT = 8


@dataclass(frozen=True, slots=True)
class Blocks:
    """`numbers` weights in blocks of `length`; the last one may be shorter."""

    numbers: int
    length: int

    @classmethod
    def of(cls, numbers: int, largest_ratio: float, length: int | None) -> Blocks:
        """Return the blocks of flat weights; `length` None chooses by the largest ratio of a meeting."""
        fitting = int(numbers / (_KEPT * largest_ratio))
        return cls(numbers, length or min(max(fitting, 1), LONGEST))

    @property
    def count(self) -> int:
        return -(-self.numbers // self.length)

    def kept(self, ratio: float) -> int:
        """Return the blocks of a meeting with this ratio, all blocks over kept blocks, to the nearest one."""
        return max(round(self.count / ratio), 1)

    def admit(self, ratio: float) -> bool:
        """Return True if a meeting with this ratio keeps a block."""
        return self.count >= ratio
