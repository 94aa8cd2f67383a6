"""Codes packed into bytes on a CPU, compiled by numba: the first code in the highest bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

Function = TypeVar("Function", bound=Callable[..., object])
Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.int8]


def compiled(function: Function) -> Function:
    """Compile a function at its first call, or load it from disk."""
    return cast(Function, numba.njit(nogil=True, cache=True)(function))


@compiled
def pack(codes: Codes, count: int, packed: Bytes, levels: int) -> None:
    """Pack the first `count` codes of at most `levels`; `codes` has room for one more."""
    if levels == 127:
        for place in range(count):
            packed[place] = np.uint8(codes[place])
    elif levels == 7:
        if count % 2:
            codes[count] = 0
        for place in range((count + 1) // 2):
            packed[place] = np.uint8((codes[2 * place] << 4) | (codes[2 * place + 1] & 15))
    else:
        _pack_eights(codes, count, packed, bits_of(levels))


@compiled
def unpack(packed: Bytes, count: int, levels: int, codes: Codes) -> None:
    """Fill the first `count` codes, with their signs."""
    if levels == 127:
        for place in range(count):
            codes[place] = np.int8(packed[place])
    elif levels == 7:
        for place in range((count + 1) // 2):
            byte = np.int8(packed[place])
            codes[2 * place] = byte >> 4
            codes[2 * place + 1] = np.int8(byte << 4) >> 4
    else:
        _unpack_eights(packed, count, bits_of(levels), codes)


@compiled
def _pack_eights(codes: Codes, count: int, packed: Bytes, bits: int) -> None:
    """Eight codes make `bits` bytes, in a word of 64 bits. The last word may have fewer bytes."""
    mask = np.uint64((1 << bits) - 1)
    for first in range(0, count, 8):
        word = np.uint64(0)
        for place in range(first, first + 8):
            code = np.uint64(codes[place]) if place < count else np.uint64(0)
            word = np.uint64((word << np.uint64(bits)) | (code & mask))
        begin = first // 8 * bits
        for place in range(min(bits, len(packed) - begin)):
            packed[begin + place] = np.uint8((word >> np.uint64(8 * (bits - 1 - place))) & np.uint64(255))


@compiled
def _unpack_eights(packed: Bytes, count: int, bits: int, codes: Codes) -> None:
    mask, sign = (1 << bits) - 1, 1 << (bits - 1)
    for first in range(0, count, 8):
        begin, word = first // 8 * bits, np.uint64(0)
        for place in range(begin, begin + bits):
            byte = np.uint64(packed[place]) if place < len(packed) else np.uint64(0)
            word = np.uint64((word << np.uint64(8)) | byte)
        for place in range(first, min(first + 8, count)):
            code = np.int64((word >> np.uint64(bits * (7 - place + first))) & np.uint64(mask))
            codes[place] = np.int8((code ^ sign) - sign)


@compiled
def bits_of(levels: int) -> int:
    """Return the bits of codes with this largest one."""
    bits = 2
    while (1 << (bits - 1)) - 1 < levels:
        bits += 1
    return bits


@compiled
def bytes_of(elements: int, levels: int) -> int:
    """Return the bytes of so many codes, which fill whole bytes."""
    return elements * bits_of(levels) // 8
