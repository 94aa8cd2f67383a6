"""Random numbers of elements by a counter hash, with equal bits in torch, numba and Triton.

All words have 32 bits, sums and products wrap. The hash of element i with the key (low, high) is

    mix(i mod 2^32 ^ low, mix(i div 2^32 + high, 0))

    mix(x, y):  x ^= x >> 16;  x *= 0x21f0aaad;  x ^= y;  x ^= x >> 15;  x *= 0x735a2d97;  x ^= x >> 15

For each y, `mix` is a bijection of low bias, with constants of Wellons' hash prospector. The y of elements
is the same for 2^32 of them. The uniform number of the element is the upper 24 bits of its hash, times 2^-24.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from weft.randomness import counter_seed

FIRST_FACTOR, SECOND_FACTOR = 0x21F0AAAD, 0x735A2D97
WORD = 0xFFFF_FFFF


class Key(NamedTuple):
    """Two 32-bit words that name the purpose of a draw."""

    low: int
    high: int

    @classmethod
    def of(cls, seed: int, *coordinates: int | str) -> Key:
        """Return the key of a purpose, such as (step, stage, level, rank)."""
        high, low = divmod(counter_seed(seed, *coordinates), WORD + 1)
        return cls(low, high)


def uniforms(key: Key, first: int, count: int, device: torch.device | str) -> torch.Tensor:
    """Return fp32 numbers in [0, 1), shape (count,), of the elements from `first` on; below 2^63."""
    # In int64: both factors are below 2^31, so that no product overflows.
    element = torch.arange(first, first + count, dtype=torch.int64, device=device)
    above = _mix((element >> 32) + key.high & WORD)
    return (_mix(element & WORD ^ key.low, above) >> 8).to(torch.float32) * 2.0**-24


def _mix(x: torch.Tensor, y: torch.Tensor | int = 0) -> torch.Tensor:
    """Return the bijection of 32-bit words, held in int64."""
    x = ((x ^ (x >> 16)) * FIRST_FACTOR & WORD) ^ y
    x = (x ^ (x >> 15)) * SECOND_FACTOR & WORD
    return x ^ (x >> 15)
