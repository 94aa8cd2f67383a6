"""The quantiser in plain torch, for all devices: the definition that faster paths equal bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft.sync.codecs.counter import Key, uniforms
from weft.sync.codecs.path import BLOCK, HALF, ONE, PLACES, SMALLEST_SCALE, CodecPath, sections

if TYPE_CHECKING:
    from weft.sync.codecs.quantiser import Quantiser


class ReferencePath(CodecPath):
    """The path of all devices and all bits."""

    def encode(
        self, form: Quantiser, values: torch.Tensor, payload: torch.Tensor, key: Key, first: int
    ) -> None:
        numbers = values.to(torch.float32, copy=form.smooth)
        if form.smooth:
            self.smooth_(numbers)
        elements, groups, levels = len(numbers), form.groups(len(numbers)), form.levels
        rows = torch.nn.functional.pad(numbers, (0, groups * form.group - elements)).view(groups, form.group)
        most = rows.abs().amax(1, keepdim=True)
        finite = most.isfinite()
        scale = most / levels
        scale = torch.where(scale < SMALLEST_SCALE, 1.0, scale)
        ratio = torch.where(finite, rows / scale, 0.0).clamp(-levels, levels)
        # Fixed point: a sum of floating numbers would round some ratios on the lattice up.
        uniform = uniforms(key, first, rows.numel(), rows.device).view_as(rows) if form.stochastic else None
        added = HALF if uniform is None else (uniform * ONE).to(torch.int64)
        codes = (ratio * ONE).to(torch.int64) + added >> PLACES
        packed, scales = sections(form, payload, elements)
        packed.copy_(pack(codes.flatten()[:elements], form.bits, len(packed)))
        scales.copy_(torch.where(finite, scale, torch.nan).flatten())

    def decode_sum(self, form: Quantiser, payloads: torch.Tensor, total: torch.Tensor) -> None:
        total.zero_()
        for payload in payloads:
            packed, scales = sections(form, payload, len(total))
            codes = unpack(packed, form.bits, len(total)).to(torch.float32)
            total.add_(scales.repeat_interleave(form.group)[: len(total)].mul_(codes))

    def smooth_(self, values: torch.Tensor) -> None:
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
