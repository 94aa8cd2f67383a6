"""The quantiser in plain torch, for all devices: the definition that faster paths equal bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft.sync.codecs.counter import Key, uniforms

if TYPE_CHECKING:
    from weft.sync.codecs.quantiser import Quantiser

# Elements of a block of the Hadamard transform.
BLOCK = 32
# Smaller scales would be subnormal: they have fewer digits, and some devices take them for zero.
SMALLEST_SCALE = 2.0**-126


def encode(form: Quantiser, values: torch.Tensor, payload: torch.Tensor, key: Key, first: int) -> None:
    """Fill `payload` with the codes and scales of `values`."""
    numbers = values.to(torch.float32, copy=form.smooth)
    if form.smooth:
        smooth_(numbers)
    elements, groups, levels = len(numbers), form.groups(len(numbers)), form.levels
    rows = torch.nn.functional.pad(numbers, (0, groups * form.group - elements)).view(groups, form.group)
    most = rows.abs().amax(1, keepdim=True)
    finite = most.isfinite()
    scale = most / levels
    scale = torch.where(scale < SMALLEST_SCALE, 1.0, scale)
    ratio = torch.where(finite, rows / scale, 0.0)
    # The sum of a ratio and a uniform number would round ratios up that lie on the lattice: add fractions.
    below = ratio.floor()
    uniform = uniforms(key, first, rows.numel(), rows.device).view_as(rows) if form.stochastic else 0.5
    codes = (below + (ratio - below + uniform >= 1)).clamp(-levels - 1, levels).to(torch.int64)
    border = form.code_bytes(elements)
    payload[:border] = pack(codes.flatten()[:elements], form.bits, border)
    payload[border:].view(torch.float32).copy_(torch.where(finite, scale, torch.nan).flatten())


def decode_sum(form: Quantiser, payloads: torch.Tensor, total: torch.Tensor) -> None:
    """Fill `total` with the sum of the decoded `payloads`."""
    border = form.code_bytes(len(total))
    total.zero_()
    for payload in payloads:
        codes = unpack(payload[:border], form.bits, len(total)).to(torch.float32)
        scale = payload[border:].view(torch.float32).repeat_interleave(form.group)[: len(total)]
        total.add_(scale.mul_(codes))


def smooth_(values: torch.Tensor) -> None:
    """Transform whole blocks: each level pairs a block's halves, and interleaves sums and differences."""
    whole = values[: len(values) // BLOCK * BLOCK].view(-1, BLOCK)
    blocks = whole
    for _ in range(BLOCK.bit_length() - 1):
        left, right = blocks.chunk(2, dim=1)
        blocks = torch.stack([left + right, left - right], dim=2).view(-1, BLOCK)
    whole.copy_(blocks)


def pack(codes: torch.Tensor, bits: int, length: int) -> torch.Tensor:
    """Return int64 `codes`, shape (n,), as `length` bytes; eight codes make `bits` bytes."""
    eights = torch.nn.functional.pad(codes & ((1 << bits) - 1), (0, -len(codes) % 8)).view(-1, 8)
    words = (eights << _shifts(8, bits, codes.device)).sum(1, keepdim=True)
    packed = (words >> _shifts(bits, 8, codes.device) & 255).to(torch.uint8).flatten()
    return torch.nn.functional.pad(packed, (0, length - len(packed)))


def unpack(packed: torch.Tensor, bits: int, elements: int) -> torch.Tensor:
    """Return the first `elements` codes in int64."""
    length = -(-elements // 8) * bits
    groups = torch.nn.functional.pad(packed.to(torch.int64), (0, length - len(packed))).view(-1, bits)
    words = (groups << _shifts(bits, 8, packed.device)).sum(1, keepdim=True)
    codes = words >> _shifts(8, bits, packed.device) & ((1 << bits) - 1)
    sign = 1 << (bits - 1)
    return ((codes ^ sign) - sign).flatten()[:elements]


def _shifts(count: int, width: int, device: torch.device) -> torch.Tensor:
    """Return the places of `count` fields of `width` bits in a word, the highest first."""
    return torch.arange(count - 1, -1, -1, device=device) * width
