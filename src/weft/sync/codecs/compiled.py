"""The quantiser on a CPU: loops over tiles that stay in the cache, compiled by numba.

The loops have no branch inside and run over neighbouring numbers, so that the compiler makes vectors of them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from weft.sync.codecs.counter import FIRST_FACTOR, SECOND_FACTOR, Key
from weft.sync.codecs.packing import Bytes, Codes, bytes_of, compiled, pack, unpack
from weft.sync.codecs.path import BLOCK, HALF, ONE, PLACES, SMALLEST_SCALE, CodecPath, sections

if TYPE_CHECKING:
    from weft.sync.codecs.quantiser import Quantiser

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.int32]

# Elements of a tile and of a chunk of tiles, or a few more: an even number of groups begins with a byte.
TILE, CHUNK = 1024, 1 << 17
# Numbers of numba keep their width only among numbers of the same type.
A, B = np.uint32(FIRST_FACTOR), np.uint32(SECOND_FACTOR)
ZERO, EIGHT, FIFTEEN, SIXTEEN = np.uint32(0), np.uint32(8), np.uint32(15), np.uint32(16)
FACTOR, SHIFT = np.float32(ONE), np.int32(PLACES)
SMALLEST, NOT_A_NUMBER = np.float32(SMALLEST_SCALE), np.float32(np.nan)
MAGNITUDE, INFINITY = np.int32(0x7FFF_FFFF), np.int32(0x7F80_0000)


class CompiledPath(CodecPath):
    """The path of CPUs. Codes of other bits than 4 and 8 need groups of a multiple of 8.

    The calling thread computes, without Python's lock.
    """

    def encode(
        self, form: Quantiser, values: torch.Tensor, payload: torch.Tensor, key: Key, first: int
    ) -> None:
        _encode_chunks(form, len(values), payload, key, first, values.__getitem__)

    def encode_difference(
        self,
        form: Quantiser,
        target: torch.Tensor,
        weights: torch.Tensor,
        payload: torch.Tensor,
        key: Key,
        first: int,
    ) -> None:
        def difference(part: slice) -> torch.Tensor:
            return target[part].to(weights.dtype) - weights[part]

        _encode_chunks(form, len(weights), payload, key, first, difference)

    def encode_sum(
        self,
        form: Quantiser,
        payloads: torch.Tensor,
        sent: Quantiser,
        elements: int,
        payload: torch.Tensor,
        key: Key,
        first: int,
    ) -> None:
        received, border = payloads.contiguous().numpy(), sent.code_bytes(elements)

        def added_up(part: slice) -> torch.Tensor:
            total = torch.empty(min(part.stop, elements) - part.start, dtype=torch.float32)
            _decode_sum(received, border, total.numpy(), part.start, sent.group, sent.levels)
            return total

        _encode_chunks(form, elements, payload, key, first, added_up, sent.group)

    def decode_sum(self, form: Quantiser, payloads: torch.Tensor, total: torch.Tensor) -> None:
        border = form.code_bytes(len(total))
        _decode_sum(payloads.contiguous().numpy(), border, total.detach().numpy(), 0, form.group, form.levels)

    def smooth_(self, values: torch.Tensor) -> None:
        _smooth_all(values.detach().numpy())


def words(key: Key, first: int, count: int) -> torch.Tensor:
    """Return the 24 bits of the uniform numbers of the elements from `first` on, int32, shape (count,)."""
    drawn = torch.empty(count, dtype=torch.int32)
    _draw(drawn.numpy(), np.uint32(key.low), np.uint32(key.high), first)
    return drawn


def _encode_chunks(
    form: Quantiser,
    elements: int,
    payload: torch.Tensor,
    key: Key,
    first: int,
    numbers: Callable[[slice], torch.Tensor],
    also_whole: int = 1,
) -> None:
    """Encode chunks that stay in the cache, of whole groups and whole multiples of `also_whole` elements."""
    codes, scales = (one.numpy() for one in sections(form, payload, elements))
    least = 2 * lcm(form.group, also_whole)
    chunk = least * max(1, CHUNK // least)
    for begin in range(0, elements, chunk):
        _encode(
            numbers(slice(begin, begin + chunk)).detach().to(torch.float32).numpy(),
            codes[begin * form.bits // 8 :],
            scales[begin // form.group :],
            *key,
            first + begin,
            form.group,
            form.levels,
            form.smooth,
            form.stochastic,
        )


@compiled
def _encode(
    values: Floats,
    codes: Bytes,
    scales: Floats,
    low: int,
    high: int,
    first: int,
    group: int,
    levels: int,
    smooth: bool,
    stochastic: bool,
) -> None:
    """Quantise and pack tile by tile."""
    tile = _tile(group)
    rooms, quantised = np.empty((2, tile), np.float32), np.empty(tile, np.int8)
    added = np.full(tile, HALF, np.int32)
    codes[max(0, len(codes) - 4) :] = 0
    for begin in range(0, len(values), tile):
        numbers = values[begin : begin + tile]
        count = len(numbers)
        if smooth:
            numbers = _smooth(numbers, rooms[0], rooms[1])
        if stochastic:
            _draw(added[:count], np.uint32(low), np.uint32(high), first + begin)
        for start in range(0, count, group):
            part = slice(start, min(start + group, count))
            place = (begin + start) // group
            _quantise(numbers[part], added[part], scales[place : place + 1], levels, quantised[part])
        pack(quantised, count, codes[bytes_of(begin, levels) :], levels)


@compiled
def _decode_sum(payloads: Bytes, border: int, total: Floats, first: int, group: int, levels: int) -> None:
    """Unpack and add elements from `first` on tile by tile, within a tile in the order of the payloads."""
    tile = _tile(group)
    quantised = np.empty(tile, np.int8)
    for begin in range(0, len(total), tile):
        sums = total[begin : begin + tile]
        sums[:] = 0
        for payload in payloads:
            scales = payload[border:].view(np.float32)
            unpack(payload[bytes_of(first + begin, levels) : border], len(sums), levels, quantised)
            for start in range(0, len(sums), group):
                part = slice(start, min(start + group, len(sums)))
                _add(quantised[part], scales[(first + begin + start) // group], sums[part])


@compiled
def _add(codes: Codes, scale: np.float32, sums: Floats) -> None:
    for position in range(len(codes)):
        sums[position] += scale * np.float32(codes[position])


@compiled
def _smooth_all(values: Floats) -> None:
    rooms = np.empty((2, TILE), np.float32)
    for begin in range(0, len(values), TILE):
        tile = values[begin : begin + TILE]
        tile[:] = _smooth(tile, rooms[0], rooms[1])


@compiled
def _smooth(values: Floats, one: Floats, other: Floats) -> Floats:
    """Return the transform of `values` in one of two rooms.

    The first numbers of all blocks come first, then all second ones. So each level is one long loop. The last
    level leaves the order of `values`.
    """
    blocks = len(values) // BLOCK
    half, end = blocks * BLOCK // 2, blocks * BLOCK
    for block in range(blocks):
        for position in range(BLOCK):
            one[position * blocks + block] = values[block * BLOCK + position]
    for _ in range(5):
        for pair in range(half):
            left, right = one[pair], one[half + pair]
            other[2 * pair] = left + right
            other[2 * pair + 1] = left - right
        one, other = other, one
    for position in range(end, len(values)):
        one[position] = values[position]
    return one[: len(values)]


@compiled
def _draw(words: Words, low: np.uint32, high: np.uint32, first: int) -> None:
    """Fill `words` with the bits of the elements' uniform numbers (`weft.sync.codecs.counter`)."""
    begin, above = np.uint32(first & 0xFFFF_FFFF), np.uint32(high + np.uint32(first >> 32))
    here, beyond = _mix(above, ZERO), _mix(np.uint32(above + np.uint32(1)), ZERO)
    for position in range(len(words)):
        word = np.uint32(begin + np.uint32(position))
        mixed = _mix(np.uint32(word ^ low), beyond if word < begin else here)
        words[position] = np.int32(mixed >> EIGHT)


@compiled
def _mix(x: np.uint32, y: np.uint32) -> np.uint32:
    x = np.uint32(np.uint32(x ^ (x >> SIXTEEN)) * A) ^ y
    x = np.uint32(np.uint32(x ^ (x >> FIFTEEN)) * B)
    return np.uint32(x ^ (x >> FIFTEEN))


@compiled
def _quantise(numbers: Floats, added: Words, scale: Floats, levels: int, codes: Codes) -> None:
    """Fill the codes and the one scale of a group."""
    # Of numbers without their sign, the order is that of their bits; a NaN is above all.
    bits, most = numbers.view(np.int32), np.int32(0)
    for position in range(len(bits)):
        most = max(most, bits[position] & MAGNITUDE)
    if most >= INFINITY:
        scale[0], codes[:] = NOT_A_NUMBER, 0
        return
    scale.view(np.int32)[0] = most
    highest = np.float32(levels)
    step = scale[0] / highest
    if step < SMALLEST:
        step = np.float32(1)
    scale[0] = step
    for position in range(len(numbers)):
        ratio = min(max(numbers[position] / step, -highest), highest)
        codes[position] = np.int8((np.int32(ratio * FACTOR) + added[position]) >> SHIFT)


@compiled
def _tile(group: int) -> int:
    return 2 * group * max(1, TILE // (2 * group))
