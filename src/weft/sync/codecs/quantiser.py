"""The quantiser of groups, and the Hadamard transform in front of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

from weft.sync.codecs.counter import Key
from weft.sync.codecs.path import BLOCK, MOST_TILE, CodecPath


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiser:
    """A symmetric quantiser of groups of neighbouring elements (SDP4Bit, arXiv 2410.15526), in fp32.

    A group has the scale s = max|x| / (2^(bits-1) - 1) and the codes floor(x / s + u), clamped to `bits`
    bits. The number u is uniform in [0, 1), or 1/2 to round to the nearest. The ratio and u have 24 binary
    places, and their sum is exact. So numbers on the lattice of codes stay. The last group may be shorter.

    - A group of zeros has the scale 1, and so has a group whose scale would be below 2^-126. Its codes are 0.
    - A group with an infinite number or a NaN has the scale NaN and codes 0. It is decoded to NaN everywhere,
      so that no such number gets lost. No device is asked for one.
    - With `smooth`, whole blocks of 32 elements are transformed first, as by `smooth_`. Decoding does not
      transform back: codecs may be chained, and `unsmooth_` ends the chain.

    A payload is one flat uint8 tensor, aligned to 4 bytes. It has the codes, zeros up to a multiple of 4
    bytes, and the fp32 scales. Codes are in two's complement, the first in the highest bits of a byte.
    Values are flat and contiguous, in fp32, bf16, fp16 or fp64. All devices make the same bits, NaNs apart.

    Attributes:
        bits: those of a code, 2 to 8; 4 and 8 have fast paths, and all on a CPU in groups of a multiple of 8.
        group: elements per scale; with `smooth` a multiple of 32.
        smooth: transform blocks of 32 elements before they are quantised.
        stochastic: round without bias, instead of to the nearest.

    Raises:
        ValueError: for bits or groups out of range.
    """

    bits: int
    group: int
    smooth: bool = False
    stochastic: bool = True

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"a code has 2 to 8 bits, not {self.bits}")
        if self.group < 1 or (self.smooth and self.group % BLOCK):
            raise ValueError(f"a group of {self.group} elements, smooth: {self.smooth}")

    @property
    def levels(self) -> int:
        """The largest code."""
        return (1 << (self.bits - 1)) - 1

    def groups(self, elements: int) -> int:
        """Return the number of scales."""
        return -(-elements // self.group)

    def code_bytes(self, elements: int) -> int:
        """Return the bytes of all codes, a multiple of 4."""
        return 4 * -(-elements * self.bits // 32)

    def payload_bytes(self, elements: int) -> int:
        """Return the bytes of a payload, a multiple of 4."""
        return self.code_bytes(elements) + 4 * self.groups(elements)

    def encode(self, values: torch.Tensor, payload: torch.Tensor, key: Key, first: int = 0) -> None:
        """Fill `payload`, shape (payload_bytes(n),), with the codes of `values`, shape (n,).

        `first` is the index of the first element in the whole that `key` names. A part that begins at a
        border of groups then has the codes that it has in the whole.

        Raises:
            ValueError: if a tensor has another shape or type, or is not contiguous.
        """
        self._check(payload, values)
        _path(payload, self).encode(self, values, payload, key, first)

    def encode_difference(
        self, target: torch.Tensor, weights: torch.Tensor, payload: torch.Tensor, key: Key, first: int = 0
    ) -> None:
        """Encode `target` - `weights`, both of shape (n,), subtracted in the precision of `weights`.

        Raises:
            ValueError: as `encode`.
        """
        self._check(payload, target, weights)
        _path(payload, self).encode_difference(self, target, weights, payload, key, first)

    def encode_sum(
        self,
        payloads: torch.Tensor,
        sent: Quantiser,
        elements: int,
        payload: torch.Tensor,
        key: Key,
        first: int = 0,
    ) -> None:
        """Encode the sum of `payloads`, shape (k, bytes), each of `elements` values in the codes of `sent`.

        Raises:
            ValueError: as `encode`.
        """
        for one in payloads:
            sent._check_payload(one, elements)
        self._check_payload(payload, elements)
        _path(payload, self, sent).encode_sum(self, payloads, sent, elements, payload, key, first)

    def decode(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        """Fill `values`, shape (n,), with the decoded `payload`, rounded to their type.

        Raises:
            ValueError: as `encode`.
        """
        total = values if values.dtype == torch.float32 else torch.empty_like(values, dtype=torch.float32)
        self.decode_sum(payload[None], total)
        if total is not values:
            values.copy_(total)

    def decode_sum(self, payloads: torch.Tensor, total: torch.Tensor) -> None:
        """Fill `total`, fp32, shape (n,), with the sum of the decoded `payloads`, shape (k, bytes), in order.

        Raises:
            ValueError: as `encode`.
        """
        if total.dtype != torch.float32 or payloads.dim() != 2:
            raise ValueError(f"payloads {_described(payloads)}, total {_described(total)}")
        for payload in payloads:
            self._check(payload, total)
        _path(total, self).decode_sum(self, payloads, total)

    def _check(self, payload: torch.Tensor, *values: torch.Tensor) -> None:
        elements = values[0].numel()
        for one in values:
            _check_values(one, elements)
        self._check_payload(payload, elements)

    def _check_payload(self, payload: torch.Tensor, elements: int) -> None:
        right = payload.dtype == torch.uint8 and payload.is_contiguous()
        aligned = payload.storage_offset() % 4 == 0 or not elements
        if not right or not aligned or payload.shape != (self.payload_bytes(elements),):
            raise ValueError(f"payload {_described(payload)} of {elements} values, {self}")


def smooth_(values: torch.Tensor) -> None:
    """Multiply each block of 32 elements of `values`, fp32, shape (n,), by the Hadamard matrix of Sylvester.

    A shorter block at the end stays as it is. The transform is not normalised.

    Raises:
        ValueError: for another shape or type, or a tensor that is not contiguous.
    """
    if values.dtype != torch.float32:
        raise ValueError(f"values {_described(values)}")
    _check_values(values, values.numel())
    _path(values).smooth_(values)


def unsmooth_(values: torch.Tensor) -> None:
    """Undo `smooth_`: transform once more and divide by 32.

    Raises:
        ValueError: as `smooth_`.
    """
    smooth_(values)
    values[: len(values) // BLOCK * BLOCK].div_(BLOCK)


def _check_values(values: torch.Tensor, elements: int) -> None:
    if values.shape != (elements,) or not values.is_contiguous() or not values.is_floating_point():
        raise ValueError(f"values {_described(values)}")


def _described(tensor: torch.Tensor) -> str:
    contiguous = "contiguous" if tensor.is_contiguous() else "not contiguous"
    return f"of shape {tuple(tensor.shape)}, {tensor.dtype}, {contiguous}, offset {tensor.storage_offset()}"


def _path(tensor: torch.Tensor, *forms: Quantiser) -> CodecPath:
    """Return the fastest path for these forms on the device of `tensor`."""
    device = tensor.device.type
    usual = all(form.bits in (4, 8) for form in forms)
    in_eights = all(form.group % 8 == 0 for form in forms)
    if device == "cpu":
        return _path_of(device if usual or in_eights else "any")
    tiled = in_eights and all(form.group <= MOST_TILE for form in forms)
    return _path_of(device if usual and tiled else "any")


@cache
def _path_of(device: str) -> CodecPath:
    """Return the path of a type of device, and import its compiler only."""
    if device == "cpu":
        from weft.sync.codecs.compiled import CompiledPath

        return CompiledPath()
    if device == "cuda" and find_spec("triton") is not None:
        from weft.sync.codecs.kernels import TritonPath

        return TritonPath()
    from weft.sync.codecs.reference import ReferencePath

    return ReferencePath()
