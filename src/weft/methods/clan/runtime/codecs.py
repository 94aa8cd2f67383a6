"""The codecs of CLAN, in torch: each brings blocks of fp32 numbers into a payload, and back.

A payload is one flat uint8 tensor, aligned to 4 bytes. Decoding is exact, so all devices decode the same
bits. A block with an infinite number or a NaN is decoded to one of these, so that none gets lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from weft.methods.clan.options import INDEX_BYTES, SCALE_BYTES, ClanOptions, Codec
from weft.sync.codecs import compiled, packing
from weft.sync.codecs.counter import Key, uniforms
from weft.sync.codecs.path import PLACES, SMALLEST_SCALE, typed
from weft.sync.codecs.quantiser import Quantiser
from weft.sync.codecs.reference import pack, unpack

# The product of eight bytes of 0 or 1, as one word, has their bits in its highest byte, the first lowest.
_GATHER_BITS = 0x0102_0408_1020_4080
# Bits of the mantissa of fp32, and the offset of its exponent.
_MANTISSA, _OFFSET = 23, 127


class Draw(NamedTuple):
    """The random numbers of one payload.

    Attributes:
        own: the key of its sender, for rounding.
        common: the key of the piece, the same for all senders and both directions.
        first: the number of its first block in the piece.
    """

    own: Key
    common: Key
    first: int = 0


class BlockCodec(ABC):
    """A codec of blocks, shape (blocks, block), fp32, contiguous, on any device."""

    def __init__(self, options: ClanOptions) -> None:
        self.options = options

    @abstractmethod
    def encode(self, numbers: torch.Tensor, elements: int, payload: torch.Tensor, draw: Draw) -> None:
        """Fill `payload`, shape (payload_bytes(blocks),); zeros follow the first `elements` of `numbers`."""

    @abstractmethod
    def decode(self, payload: torch.Tensor, numbers: torch.Tensor, draw: Draw) -> None:
        """Fill `numbers`; behind the elements they may have any value."""

    def leave(self, share: torch.Tensor, payload: torch.Tensor, elements: int, draw: Draw) -> None:
        """Subtract from the first `elements` of a share, shape (blocks, block), their decoded payload."""
        decoded = torch.empty_like(share, dtype=torch.float32)
        self.decode(payload, decoded, draw)
        share.sub_(decoded).view(-1)[elements:] = 0.0

    def decode_sum(self, payloads: torch.Tensor, total: torch.Tensor, draw: Draw) -> None:
        """Fill `total`, shape (blocks, block), with the sum of the decoded `payloads`, in their order."""
        total.zero_()
        decoded = torch.empty_like(total, dtype=torch.float32)
        for payload in payloads:
            self.decode(payload, decoded, draw)
            total.add_(decoded)

    def encode_sum(
        self,
        payloads: torch.Tensor,
        total: torch.Tensor,
        error: torch.Tensor | None,
        elements: int,
        given: torch.Tensor,
        draw: Draw,
    ) -> None:
        """Fill `given` with the encoded sum of `payloads` and their owner's `error`.

        `total`, shape (blocks, block), has `elements` elements. It becomes the new error, if one is kept.
        """
        self.decode_sum(payloads, total, draw)
        total.view(-1)[elements:] = 0.0
        if error is not None:
            total += error
        self.encode(total.to(torch.float32), elements, given, draw)
        if error is not None:
            self.leave(total, given, elements, draw)


class ScaledSign(BlockCodec):
    """The signs of a block times its mean magnitude; zero counts as positive."""

    def encode(self, numbers: torch.Tensor, elements: int, payload: torch.Tensor, draw: Draw) -> None:
        blocks, block = numbers.shape
        begins = torch.arange(0, blocks * block, block, device=numbers.device)
        counts = (elements - begins).clamp(1, block)
        scale = torch.linalg.vector_norm(numbers, 1, dim=1) / counts
        signs, scales = _codes_and_scales(payload, blocks)
        words = (numbers < 0).view(torch.uint8).view(torch.int64)
        signs.copy_(((words * _GATHER_BITS) >> 56).view(-1))
        scales.copy_(torch.where(scale.isfinite(), scale, torch.nan))

    def decode(self, payload: torch.Tensor, numbers: torch.Tensor, draw: Draw) -> None:
        signs, scales = _codes_and_scales(payload, len(numbers))
        torch.index_select(_SIGNS.to(numbers.device), 0, signs.to(torch.int32), out=numbers.view(-1, 8))
        numbers.mul_(scales[:, None])


def _table_of_signs() -> torch.Tensor:
    bytes_ = torch.arange(256)[:, None] >> torch.arange(8)
    return 1.0 - 2.0 * (bytes_ & 1)


_SIGNS = _table_of_signs()


class TopK(BlockCodec):
    """The largest magnitudes of each block, with their indices; of equal ones those with the lowest index."""

    def encode(self, numbers: torch.Tensor, elements: int, payload: torch.Tensor, draw: Draw) -> None:
        blocks, block = numbers.shape
        # Magnitudes have the order of their bits, with NaN above all. The index makes every number different.
        places = torch.arange(block - 1, -1, -1, device=numbers.device)
        ordered = (numbers.view(torch.int32).to(torch.int64) & 0x7FFF_FFFF) << 16 | places
        largest = ordered.topk(self.options.kept, dim=1, sorted=False).values
        indices = block - 1 - (largest & 0xFFFF)
        values, where = self._sections(payload, blocks)
        values.copy_(numbers.gather(1, indices))
        # The low 16 bits, which decoding reads without a sign.
        where.copy_(indices - (indices >> 15 << 16))

    def decode(self, payload: torch.Tensor, numbers: torch.Tensor, draw: Draw) -> None:
        values, where = self._sections(payload, len(numbers))
        indices = where.to(torch.int64) & 0xFFFF
        numbers.zero_().scatter_(1, indices, values.to(torch.float32))

    def _sections(self, payload: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values and the indices of a payload, views of shape (blocks, kept)."""
        values, border = _values_of(payload, blocks, self.options)
        end = border + INDEX_BYTES * values.numel()
        return values, typed(payload[border:end], torch.int16).view(values.shape)


class RandomK(BlockCodec):
    """Random places of each block, the same on all ranks, so that nobody sends their indices.

    A subset drawn for the piece is rotated by a shift drawn for each block. So every subset of a block has
    the same probability. Without errors, numbers are scaled to be right in the mean.
    """

    def encode(self, numbers: torch.Tensor, elements: int, payload: torch.Tensor, draw: Draw) -> None:
        blocks, block = numbers.shape
        chosen = numbers.gather(1, self._indices(blocks, draw, numbers.device))
        if not self.options.keeps_errors:
            chosen.mul_(block / self.options.kept)
        finite = numbers.sum(1, keepdim=True).isfinite() | numbers.isfinite().all(1, keepdim=True)
        _values_of(payload, blocks, self.options)[0].copy_(torch.where(finite, chosen, torch.nan))

    def decode(self, payload: torch.Tensor, numbers: torch.Tensor, draw: Draw) -> None:
        self._scatter(_values_of(payload, len(numbers), self.options)[0].to(torch.float32), numbers, draw)

    def decode_sum(self, payloads: torch.Tensor, total: torch.Tensor, draw: Draw) -> None:
        """Add up packed values: all ranks have sent those of the same indices."""
        blocks = len(total)
        summed = total.new_zeros(blocks, self.options.kept)
        for payload in payloads:
            summed += _values_of(payload, blocks, self.options)[0]
        self._scatter(summed, total, draw)

    def _scatter(self, values: torch.Tensor, numbers: torch.Tensor, draw: Draw) -> None:
        """Put values into their places; one that is none fills its block, which may be chosen elsewhere."""
        numbers.zero_().scatter_(1, self._indices(len(numbers), draw, numbers.device), values)
        numbers.add_(torch.where(values.isnan().any(1, keepdim=True), torch.nan, 0.0))

    def _indices(self, blocks: int, draw: Draw, device: torch.device) -> torch.Tensor:
        """Return the chosen indices, shape (blocks, kept)."""
        block, kept = self.options.block, self.options.kept
        # A stable sort puts equal draws in one order on all devices.
        subset = uniforms(draw.common, 0, block, device).sort(stable=True).indices[:kept]
        shifts = uniforms(draw.common, block + draw.first, blocks, device) * block
        return (subset + shifts.to(torch.int64)[:, None]) % block


class LinearDithering(BlockCodec):
    """Multiples of a fraction of a block's largest magnitude, rounded without bias: weft's quantiser."""

    def __init__(self, options: ClanOptions) -> None:
        super().__init__(options)
        self._quantiser = Quantiser(bits=options.bits, group=options.block)

    def encode(self, numbers: torch.Tensor, elements: int, payload: torch.Tensor, draw: Draw) -> None:
        self._quantiser.encode(numbers.view(-1), payload, draw.own, draw.first * self.options.block)

    def decode(self, payload: torch.Tensor, numbers: torch.Tensor, draw: Draw) -> None:
        self._quantiser.decode(payload, numbers.view(-1))

    def decode_sum(self, payloads: torch.Tensor, total: torch.Tensor, draw: Draw) -> None:
        if total.dtype == torch.float32:
            self._quantiser.decode_sum(payloads, total.view(-1))
        else:
            super().decode_sum(payloads, total, draw)


class NaturalDithering(BlockCodec):
    """Powers of two times a block's largest magnitude, and zero, rounded without bias.

    A code is a sign and a level. Level 0 is zero, and level l is the factor 2^(l - s) for s levels.
    """

    @property
    def _levels(self) -> int:
        return (1 << (self.options.bits - 1)) - 1

    def encode(self, numbers: torch.Tensor, elements: int, payload: torch.Tensor, draw: Draw) -> None:
        most = numbers.abs().amax(1, keepdim=True)
        usable = most.isfinite() & (most >= SMALLEST_SCALE)
        ratio = torch.where(usable, numbers.abs() / most, 0.0)
        first = draw.first * self.options.block
        drawn = _words(draw.own, first, numbers)
        # A random mantissa carries into the exponent with the probability of the own mantissa.
        level = (ratio.view(torch.int32) + (drawn >> 1) >> _MANTISSA) - _OFFSET + self._levels
        lowest = drawn < ratio * 2.0 ** (self._levels - 1 + PLACES)
        level = torch.where(ratio < 2.0 ** (1 - self._levels), lowest.to(torch.int32), level)
        codes = level | (numbers < 0).to(torch.int32) << (self.options.bits - 1)
        packed, scales = _codes_and_scales(payload, len(numbers))
        _pack(codes.flatten(), self.options.bits, packed)
        scales.copy_(
            torch.where(usable | most.isfinite(), torch.where(usable, most, 0.0), torch.nan).flatten()
        )

    def decode(self, payload: torch.Tensor, numbers: torch.Tensor, draw: Draw) -> None:
        packed, scales = _codes_and_scales(payload, len(numbers))
        codes = _unpack(packed, self.options.bits, numbers.numel())
        torch.index_select(self._factors(numbers.device), 0, codes, out=numbers.view(-1))
        numbers.mul_(scales[:, None])

    def _factors(self, device: torch.device) -> torch.Tensor:
        """Return the factor of each code, shape (2^bits,)."""
        levels = torch.arange(self._levels + 1, dtype=torch.float32, device=device)
        factors = torch.where(levels > 0, torch.exp2(levels - self._levels), 0.0)
        return torch.cat([factors, -factors])


class HalfPrecision(BlockCodec):
    """Numbers rounded to fp16. One that is too large becomes infinite, and is not hidden."""

    def encode(self, numbers: torch.Tensor, elements: int, payload: torch.Tensor, draw: Draw) -> None:
        typed(payload, torch.float16).copy_(numbers.view(-1))

    def decode(self, payload: torch.Tensor, numbers: torch.Tensor, draw: Draw) -> None:
        numbers.view(-1).copy_(typed(payload, torch.float16))


class Plain(BlockCodec):
    """Numbers as they are, in fp32."""

    def encode(self, numbers: torch.Tensor, elements: int, payload: torch.Tensor, draw: Draw) -> None:
        typed(payload, torch.float32).copy_(numbers.view(-1))

    def decode(self, payload: torch.Tensor, numbers: torch.Tensor, draw: Draw) -> None:
        numbers.view(-1).copy_(typed(payload, torch.float32))

    def decode_sum(self, payloads: torch.Tensor, total: torch.Tensor, draw: Draw) -> None:
        total.zero_()
        for payload in payloads:
            total.view(-1).add_(typed(payload, torch.float32))


def _codes_and_scales(payload: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of codes and the fp32 scales of a payload, both views of it."""
    border = len(payload) - SCALE_BYTES * blocks
    return payload[:border], typed(payload[border:], torch.float32)


def _values_of(payload: torch.Tensor, blocks: int, options: ClanOptions) -> tuple[torch.Tensor, int]:
    """Return the sent values, a view of shape (blocks, kept), and the byte behind them."""
    border = blocks * options.kept * options.value_bits // 8
    kind = torch.float32 if options.value_bits == 32 else torch.bfloat16
    return typed(payload[:border], kind).view(blocks, options.kept), border


def _words(key: Key, first: int, like: torch.Tensor) -> torch.Tensor:
    """Return the upper 24 bits of the hashes of elements from `first` on, int32, in the shape of `like`."""
    if like.device.type == "cpu":
        return compiled.words(key, first, like.numel()).view_as(like)
    numbers = uniforms(key, first, like.numel(), like.device)
    return (numbers * 2.0**PLACES).to(torch.int32).view_as(like)


def _pack(codes: torch.Tensor, bits: int, packed: torch.Tensor) -> None:
    """Fill `packed` with codes, int32, shape (n,); n is a multiple of 8."""
    if bits == 8:
        packed.copy_(codes)
    elif codes.device.type == "cpu":
        packing.pack(codes.to(torch.int8).numpy(), len(codes), packed.numpy(), (1 << (bits - 1)) - 1)
    else:
        packed.copy_(pack(codes.to(torch.int64), bits, len(packed)))


def _unpack(packed: torch.Tensor, bits: int, elements: int) -> torch.Tensor:
    """Return codes without a sign, in an integer type that may be an index."""
    if bits == 8:
        return packed.to(torch.int32)
    if packed.device.type == "cpu":
        codes = torch.empty(elements, dtype=torch.int8)
        packing.unpack(packed.numpy(), elements, (1 << (bits - 1)) - 1, codes.numpy())
        return codes.to(torch.int32) & ((1 << bits) - 1)
    return unpack(packed, bits, elements) & ((1 << bits) - 1)


_CODECS: Mapping[Codec, Callable[[ClanOptions], BlockCodec]] = {
    "scaled-sign": ScaledSign,
    "top-k": TopK,
    "random-k": RandomK,
    "linear-dithering": LinearDithering,
    "natural-dithering": NaturalDithering,
    "fp16": HalfPrecision,
    "fp32": Plain,
}


def codec_of(options: ClanOptions) -> BlockCodec:
    """Return the codec with these options."""
    return _CODECS[options.codec](options)
