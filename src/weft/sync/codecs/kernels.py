"""The quantiser on CUDA: Triton kernels that read every number once and write every code once.

A program takes a tile: some rows, each of one group, padded to a power of two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from weft.sync.codecs.counter import FIRST_FACTOR, SECOND_FACTOR, Key
from weft.sync.codecs.path import BLOCK, HALF, ONE, PLACES, SMALLEST_SCALE, CodecPath, sections

if TYPE_CHECKING:
    from weft.sync.codecs.quantiser import Quantiser

# Elements of a tile, where its groups are not longer.
TILE = 2048
A, B = tl.constexpr(FIRST_FACTOR), tl.constexpr(SECOND_FACTOR)
FACTOR, MIDDLE, SHIFT = tl.constexpr(float(ONE)), tl.constexpr(HALF), tl.constexpr(PLACES)
SMALLEST, INFINITY = tl.constexpr(SMALLEST_SCALE), tl.constexpr(0x7F80_0000)
# A fused product and sum would have other bits than those of other devices.
OPTIONS = {"enable_fp_fusion": False}


class TritonPath(CodecPath):
    """The path of CUDA, for codes of 4 and 8 bits and groups of a multiple of 8."""

    def encode(
        self, form: Quantiser, values: torch.Tensor, payload: torch.Tensor, key: Key, first: int
    ) -> None:
        codes, scales = sections(form, payload, len(values))
        _encode[_programs(form, len(values))](
            values, codes, scales, len(values), *key, first, **_layout(form), **_rounding(form), **OPTIONS
        )

    def encode_difference(
        self,
        form: Quantiser,
        target: torch.Tensor,
        weights: torch.Tensor,
        payload: torch.Tensor,
        key: Key,
        first: int,
    ) -> None:
        if torch.float64 in (target.dtype, weights.dtype):
            super().encode_difference(form, target, weights, payload, key, first)
            return
        codes, scales = sections(form, payload, len(weights))
        _encode_difference[_programs(form, len(weights))](
            target, weights, codes, scales, len(weights), *key, first,
            **_layout(form), **_rounding(form), **OPTIONS,
        )  # fmt: skip

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
        if form.group != sent.group:
            super().encode_sum(form, payloads, sent, elements, payload, key, first)
            return
        codes, scales = sections(form, payload, elements)
        _encode_sum[_programs(form, elements)](
            *_received(sent, payloads, elements), codes, scales, elements, *key, first,
            sent_levels=sent.levels, **_layout(form), **_rounding(form), **OPTIONS,
        )  # fmt: skip

    def decode_sum(self, form: Quantiser, payloads: torch.Tensor, total: torch.Tensor) -> None:
        _decode_sum[_programs(form, len(total))](
            *_received(form, payloads, len(total)), total, len(total),
            sent_levels=form.levels, **_layout(form), **OPTIONS,
        )  # fmt: skip

    def smooth_(self, values: torch.Tensor) -> None:
        rows = TILE // BLOCK
        _smooth_all[(triton.cdiv(len(values), TILE),)](
            values, len(values), group=BLOCK, rows=rows, width=BLOCK
        )


def _layout(form: Quantiser) -> dict[str, int]:
    width = triton.next_power_of_2(form.group)
    rows = max(1, TILE // width)
    return {"group": form.group, "rows": rows, "width": width, "num_warps": max(4, rows * width // 1024)}


def _rounding(form: Quantiser) -> dict[str, int | bool]:
    return {"levels": form.levels, "smooth": form.smooth, "stochastic": form.stochastic}


def _programs(form: Quantiser, elements: int) -> tuple[int]:
    return (triton.cdiv(form.groups(elements), _layout(form)["rows"]),)


def _received(
    sent: Quantiser, payloads: torch.Tensor, elements: int
) -> tuple[torch.Tensor, torch.Tensor, int, int, int]:
    """Return payloads as bytes and as words, their number, the bytes of one and of its codes."""
    flat = payloads.contiguous().view(-1)
    return flat, flat.view(torch.float32), *payloads.shape, sent.code_bytes(elements)


@triton.jit(do_not_specialize=["low", "high", "first"])
def _encode(
    values: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    elements: tl.tensor,
    low: tl.uint32,
    high: tl.uint32,
    first: tl.int64,
    group: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    levels: tl.constexpr,
    smooth: tl.constexpr,
    stochastic: tl.constexpr,
) -> None:
    begin, places, inside = _tile(elements, group, rows, width)
    numbers = tl.load(values + begin + places, mask=inside, other=0).to(tl.float32)
    _store(numbers, codes, scales, elements, low, high, first, group, rows, width, levels, smooth, stochastic)


@triton.jit(do_not_specialize=["low", "high", "first"])
def _encode_difference(
    target: tl.tensor,
    weights: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    elements: tl.tensor,
    low: tl.uint32,
    high: tl.uint32,
    first: tl.int64,
    group: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    levels: tl.constexpr,
    smooth: tl.constexpr,
    stochastic: tl.constexpr,
) -> None:
    begin, places, inside = _tile(elements, group, rows, width)
    kind: tl.constexpr = weights.dtype.element_ty
    wanted = tl.load(target + begin + places, mask=inside, other=0).to(kind).to(tl.float32)
    present = tl.load(weights + begin + places, mask=inside, other=0).to(tl.float32)
    numbers = (wanted - present).to(kind).to(tl.float32)
    _store(numbers, codes, scales, elements, low, high, first, group, rows, width, levels, smooth, stochastic)


@triton.jit(do_not_specialize=["low", "high", "first"])
def _encode_sum(
    payloads: tl.tensor,
    words: tl.tensor,
    replicas: tl.constexpr,
    payload_bytes: tl.tensor,
    border: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    elements: tl.tensor,
    low: tl.uint32,
    high: tl.uint32,
    first: tl.int64,
    sent_levels: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    levels: tl.constexpr,
    smooth: tl.constexpr,
    stochastic: tl.constexpr,
) -> None:
    numbers = _sum(
        payloads, words, replicas, payload_bytes, border, elements, sent_levels, group, rows, width
    )
    _store(numbers, codes, scales, elements, low, high, first, group, rows, width, levels, smooth, stochastic)


@triton.jit
def _decode_sum(
    payloads: tl.tensor,
    words: tl.tensor,
    replicas: tl.constexpr,
    payload_bytes: tl.tensor,
    border: tl.tensor,
    total: tl.tensor,
    elements: tl.tensor,
    sent_levels: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
) -> None:
    begin, places, inside = _tile(elements, group, rows, width)
    numbers = _sum(
        payloads, words, replicas, payload_bytes, border, elements, sent_levels, group, rows, width
    )
    tl.store(total + begin + places, numbers, mask=inside)


@triton.jit
def _smooth_all(
    values: tl.tensor, elements: tl.tensor, group: tl.constexpr, rows: tl.constexpr, width: tl.constexpr
) -> None:
    begin, places, inside = _tile(elements, group, rows, width)
    numbers = tl.load(values + begin + places, mask=inside, other=0)
    smooth = _smooth(numbers, places, elements - begin, rows, width)
    tl.store(values + begin + places, smooth, mask=inside)


@triton.jit
def _tile(elements: tl.tensor, group: tl.constexpr, rows: tl.constexpr, width: tl.constexpr) -> tl.tensor:
    """Return the first place of a tile, the places from there, shape (rows, width), and where numbers are."""
    column = tl.arange(0, width)[None, :]
    begin = tl.program_id(0).to(tl.int64) * (rows * group)
    places = tl.arange(0, rows)[:, None] * group + column
    count = tl.minimum(elements - begin, rows * group).to(tl.int32)
    return begin, places, (column < group) & (places < count)


@triton.jit
def _store(
    numbers: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    elements: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    first: tl.tensor,
    group: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    levels: tl.constexpr,
    smooth: tl.constexpr,
    stochastic: tl.constexpr,
) -> None:
    """Quantise and pack a tile of fp32 numbers, zeros where there are none."""
    begin, places, inside = _tile(elements, group, rows, width)
    if smooth:
        numbers = _smooth(numbers, places, elements - begin, rows, width)
    # Of numbers without their sign, the order is that of their bits; a NaN is above all.
    most = tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFF_FFFF, axis=1)
    finite = most < INFINITY
    scale = tl.div_rn(most.to(tl.float32, bitcast=True), tl.full((rows,), levels, tl.float32))
    scale = tl.where(finite & (scale >= SMALLEST), scale, 1.0)
    ratio = tl.where(finite[:, None], tl.div_rn(numbers, tl.broadcast_to(scale[:, None], (rows, width))), 0.0)
    ratio = tl.minimum(tl.maximum(ratio, -levels * 1.0), levels * 1.0)
    code = (ratio * FACTOR).to(tl.int32)
    if stochastic:
        code += _draw(places, first + begin, low, high)
    else:
        code += MIDDLE
    code = code >> SHIFT
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    groups = tl.cdiv(elements, group)
    tl.store(scales + row, tl.where(finite, scale, float("nan")), mask=row < groups)
    if levels == 7:
        upper, lower = tl.split(tl.reshape(code, (rows, width // 2, 2)))
        code = (upper << 4) | (lower & 15)
    begin, places, inside = _bytes(elements, group, rows, width, levels)
    tl.store(codes + begin + places, (code & 255).to(tl.uint8), mask=inside)


@triton.jit
def _bytes(
    elements: tl.tensor, group: tl.constexpr, rows: tl.constexpr, width: tl.constexpr, levels: tl.constexpr
) -> tl.tensor:
    """Return the first byte of a tile's codes, the bytes from there, and where they are.

    Zeros behind the last code, up to a multiple of 4 bytes, belong to its tile.
    """
    per_byte: tl.constexpr = 2 if levels == 7 else 1
    column = tl.arange(0, width // per_byte)[None, :]
    begin = tl.program_id(0).to(tl.int64) * (rows * group // per_byte)
    places = tl.arange(0, rows)[:, None] * (group // per_byte) + column
    border = tl.cdiv(elements, 4 * per_byte) * 4
    count = tl.minimum(border - begin, rows * group // per_byte).to(tl.int32)
    return begin, places, (column < group // per_byte) & (places < count)


@triton.jit
def _sum(
    payloads: tl.tensor,
    words: tl.tensor,
    replicas: tl.constexpr,
    payload_bytes: tl.tensor,
    border: tl.tensor,
    elements: tl.tensor,
    levels: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
) -> tl.tensor:
    """Return the sum of a tile's decoded numbers over all payloads, in their order."""
    begin, places, inside = _bytes(elements, group, rows, width, levels)
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    groups = tl.cdiv(elements, group)
    total = tl.zeros((rows, width), tl.float32)
    for replica in range(replicas):
        payload = tl.cast(replica, tl.int64) * payload_bytes
        code = tl.load(payloads + payload + begin + places, mask=inside, other=0).to(tl.int8, bitcast=True)
        if levels == 7:
            code = tl.reshape(tl.join(code >> 4, (code << 4) >> 4), (rows, width))
        scale = tl.load(words + (payload + border) // 4 + row, mask=row < groups, other=0)
        total += scale[:, None] * code.to(tl.float32)
    return total


@triton.jit
def _smooth(
    numbers: tl.tensor, places: tl.tensor, count: tl.tensor, rows: tl.constexpr, width: tl.constexpr
) -> tl.tensor:
    """Return a tile with its whole blocks transformed."""
    blocks: tl.constexpr = rows * width // 32
    smooth = tl.reshape(numbers, (blocks, 32))
    for _ in tl.static_range(5):
        left, right = tl.split(tl.permute(tl.reshape(smooth, (blocks, 2, 16)), (0, 2, 1)))
        smooth = tl.reshape(tl.join(left + right, left - right), (blocks, 32))
    return tl.where(places < count // 32 * 32, tl.reshape(smooth, (rows, width)), numbers)


@triton.jit
def _draw(place: tl.tensor, begin: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Return the bits of the uniform numbers of the elements begin + place (`weft.sync.codecs.counter`)."""
    start, above = begin.to(tl.uint32), (begin >> 32).to(tl.uint32) + high
    here, beyond = _mix(above, 0), _mix(above + 1, 0)
    word = start + place.to(tl.uint32)
    mixed = _mix(word ^ low, tl.where(word < start, beyond, here))
    return (mixed >> 8).to(tl.int32)


@triton.jit
def _mix(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    x = ((x ^ (x >> 16)) * A) ^ y
    x = (x ^ (x >> 15)) * B
    return x ^ (x >> 15)
