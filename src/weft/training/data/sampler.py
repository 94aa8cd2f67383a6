"""The sample ledger: the samples of every step, as a function of (seed, position) alone.

Samples are drawn without replacement. Position p of the endless stream of samples is in epoch p // samples.
In an epoch a keyed permutation of all sample numbers gives the sample at a position. A step takes the next
`global_batch` positions. So the last samples of an epoch may share a step with the first ones of the next.
The permutation is a balanced Feistel network over the smallest even number of bits for all samples. Cycle
walking handles the numbers outside (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
So the ledger stores nothing and computes any position directly.

A resumed run needs only its number of trained samples, with any ranks and any global batch. Every plan of a
job draws the same samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from weft.errors import InputError, Violation
from weft.program.arrays import Ints
from weft.program.codes import GOLDEN, mix

# Four rounds make a Feistel network pseudo-random for large halves; small halves need more to mix.
ROUNDS = 8

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class SampleLedger:
    """An endless stream of the `samples` sample numbers in a pseudo-random order that `seed` keys.

    Numbers of a block follow each other. With blocks of several samples, they are whole blocks.

    Raises:
        InputError: if there is no sample to draw from.
    """

    samples: int
    seed: int
    block: int = 1

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise InputError(Violation("data", f"{self.samples} samples; at least 1 is needed", "1"))

    def take(self, position: int, count: int) -> Ints:
        """Return the sample numbers from a position on, shape (count,).

        Global micro-batch g of size b of a step that begins at p is `take(p + g * b, b)`.
        """
        return self.at(np.arange(position, position + count, dtype=np.int64))

    def at(self, positions: Ints) -> Ints:
        """Return the sample numbers at any positions of the endless stream, in the same shape."""
        blocks, inside = np.divmod(positions, self.block)
        return self._block_at(blocks) * self.block + inside

    def _block_at(self, positions: Ints) -> Ints:
        count = self.samples // self.block
        epoch, index = np.divmod(positions, count)
        half_bits = max(1, -(-(count - 1).bit_length() // 2))
        seed_key = mix(np.array([self.seed & _MASK], dtype=np.uint64) + GOLDEN)
        keys = mix(seed_key + epoch.astype(np.uint64) * GOLDEN)
        value = _feistel(index.astype(np.uint64), keys, half_bits)
        # The network permutes 0 .. 4**half_bits - 1; repeated until it lands inside, it permutes the samples.
        outside = value >= count
        while outside.any():
            value[outside] = _feistel(value[outside], keys[outside], half_bits)
            outside = value >= count
        return value.astype(np.int64)

    def epochs(self, position: int) -> float:
        """Return the passes over the data up to a position."""
        return position / self.samples


@dataclass(frozen=True)
class StepSamples:
    """The samples that steps take from a ledger, one micro-batch after the other.

    Attributes:
        numbers: by step of a cycle, the numbers in the global batch of the micro-batches that run.
        size: samples of a micro-batch.
    """

    numbers: tuple[tuple[int, ...], ...]
    size: int

    def of(self, step: int) -> int:
        """Return the number of samples of a step."""
        return self.size * len(self._places_in(step))

    def before(self, step: int) -> int:
        """Return the number of samples of all steps before this one."""
        cycles, rest = divmod(step, len(self.numbers))
        return self.size * (cycles * self._starts[-1] + self._starts[rest])

    def position(self, step: int, number: int) -> int:
        """Return the number of samples before a micro-batch that runs in a step."""
        return self.before(step) + self.size * self._places_in(step)[number]

    def runs(self, step: int, number: int) -> bool:
        """Return True if the micro-batch runs in the step."""
        return number in self._places_in(step)

    def _places_in(self, step: int) -> Mapping[int, int]:
        """Return the place of each micro-batch among those that run in a step, by its number."""
        return self._places[step % len(self.numbers)]

    @cached_property
    def _places(self) -> tuple[Mapping[int, int], ...]:
        return tuple({number: place for place, number in enumerate(one)} for one in self.numbers)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """The micro-batches of a cycle before each of its steps, and those of the whole cycle."""
        return tuple(accumulate(map(len, self.numbers), initial=0))


_MASK = (1 << 64) - 1
_ROUND_CONSTANTS = np.arange(1, ROUNDS + 1, dtype=np.uint64) * GOLDEN


def _feistel(value: Words, keys: Words, half_bits: int) -> Words:
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = value >> shift, value & mask
    for constant in _ROUND_CONSTANTS:
        left, right = right, left ^ (mix(right ^ mix(keys + constant)) & mask)
    return (left << shift) | right
