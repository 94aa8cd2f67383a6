"""The interface of the quantiser's paths: one for each kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from weft.sync.codecs.counter import Key

if TYPE_CHECKING:
    from weft.sync.codecs.quantiser import Quantiser

# Elements of a block of the Hadamard transform.
BLOCK = 32
# Ratios to the scale and uniform numbers are cut to so many binary places and added in fixed point.
PLACES = 24
ONE, HALF = 1 << PLACES, 1 << (PLACES - 1)
# Elements of a group that one program of an accelerator can hold.
MOST_TILE = 16384
# Smaller scales would be subnormal: they have fewer digits, and some devices take them for zero.
SMALLEST_SCALE = 2.0**-126


class CodecPath(ABC):
    """The computations of a `Quantiser`, on tensors that it has checked. All paths make the same bits."""

    @abstractmethod
    def encode(
        self, form: Quantiser, values: torch.Tensor, payload: torch.Tensor, key: Key, first: int
    ) -> None:
        """Fill `payload` with the codes and scales of `values`."""

    def encode_difference(
        self,
        form: Quantiser,
        target: torch.Tensor,
        weights: torch.Tensor,
        payload: torch.Tensor,
        key: Key,
        first: int,
    ) -> None:
        """Fill `payload` with the codes and scales of a difference in the precision of `weights`."""
        self.encode(form, target.to(weights.dtype) - weights, payload, key, first)

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
        """Fill `payload` with the codes and scales of the sum of `payloads`."""
        total = torch.empty(elements, dtype=torch.float32, device=payload.device)
        self.decode_sum(sent, payloads, total)
        self.encode(form, total, payload, key, first)

    @abstractmethod
    def decode_sum(self, form: Quantiser, payloads: torch.Tensor, total: torch.Tensor) -> None:
        """Fill `total` with the sum of the decoded `payloads`."""

    @abstractmethod
    def smooth_(self, values: torch.Tensor) -> None:
        """Transform whole blocks of fp32 `values`.

        Each level pairs a block's halves, and interleaves their sums and differences.
        """


def sections(form: Quantiser, payload: torch.Tensor, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of codes and the fp32 scales of a payload, both views of it."""
    border = form.code_bytes(elements)
    return payload[:border], typed(payload[border:], torch.float32)


def typed(content: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes as numbers of a type, a view; a row of no bytes may begin anywhere."""
    return content.view(dtype) if len(content) else content.new_empty(0, dtype=dtype)
