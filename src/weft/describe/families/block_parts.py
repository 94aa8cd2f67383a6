"""`BlockPart`: what a part of a decoder's block computes and keeps; a block is the sum of its parts."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from weft.describe.amount import ZERO, Amount
from weft.describe.families.transformer import per_stream_token, per_token, token_product
from weft.describe.layer import Matmul


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPart:
    """Amounts of one part, with the meaning that `weft.describe.layer.Layer` gives them.

    `weights` and `attention` are the products of the forward pass; `memory` and `kernels` its other kernels.
    """

    weights: tuple[Matmul, ...] = ()
    attention: tuple[Matmul, ...] = ()
    parameters: Amount = ZERO
    kept: Amount = ZERO
    kept_bytes: Amount = ZERO
    products: Amount = ZERO
    product_bytes: Amount = ZERO
    freed_products: Amount = ZERO
    memory: Amount = ZERO
    kernels: int = 0
    routed: tuple[Matmul, ...] = ()
    routed_share: float = 0.0
    routed_kept: Amount = ZERO

    def __add__(self, other: BlockPart) -> BlockPart:
        # Typed loosely because the fields have several types, all of which can be added.
        sums: dict[str, Any] = {
            field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)
        }
        return replace(self, **sums)


@dataclass(frozen=True, slots=True)
class NormCost:
    """The costs of a norm of vectors, per element; `bytes_per_vector` per vector.

    `kept` and `kept_bytes` count its saved tensors without the result, which the next product keeps.
    `kept_for_weight` and `bytes_for_weight` are their parts for the gradient of the weight alone.
    """

    parameters: int
    memory: float
    kernels: int
    kept: float
    kept_bytes: float
    bytes_per_vector: float
    kept_for_weight: float = 0.0
    bytes_for_weight: float = 0.0

    def of_stream(self, width: int) -> BlockPart:
        """Return one norm of the stream."""
        return BlockPart(
            parameters=Amount.of(self.parameters * width),
            kept=per_stream_token(self.kept * width),
            kept_bytes=per_stream_token(self.kept_bytes * width + self.bytes_per_vector),
            memory=per_stream_token(self.memory * width),
            kernels=self.kernels,
        )

    def inside(self, width: int, vectors: int, parameters: Amount, *, divided: bool) -> BlockPart:
        """Return norms of `vectors` vectors per token inside a branch, together `width` elements."""
        return BlockPart(
            parameters=parameters,
            kept=per_token(self.kept * width, divided=divided),
            kept_bytes=per_token(self.kept_bytes * width + self.bytes_per_vector * vectors, divided=divided),
            memory=per_token(self.memory * width, divided=divided),
            kernels=self.kernels,
        )


# An RMS norm reads, squares and scales. It computes in fp32 for every precision of its input, which it keeps
# in fp32 with the inverse root. One that also scales in fp32 keeps the normalised vector so, too. A layer
# norm is one kernel that keeps its input, the mean and the inverse deviation; the one without a bias
# subtracts the mean twice in fp32, and the one without a weight reads a copy of its input in fp32.
NORMS = {
    "rms": NormCost(1, 4.0, 4, kept=1.0, kept_bytes=4.0, bytes_per_vector=4.0, kept_for_weight=1.0),
    "rms-fp32": NormCost(1, 5.0, 5, kept=0.0, kept_bytes=8.0, bytes_per_vector=4.0, bytes_for_weight=4.0),
    "rms-without-weight": NormCost(0, 4.0, 4, kept=0.0, kept_bytes=4.0, bytes_per_vector=4.0),
    "layer": NormCost(2, 2.0, 1, kept=1.0, kept_bytes=0.0, bytes_per_vector=8.0),
    "layer-without-bias": NormCost(
        1, 8.0, 8, kept=0.0, kept_bytes=12.0, bytes_per_vector=4.0, bytes_for_weight=4.0
    ),
    "layer-without-weight": NormCost(0, 4.0, 3, kept=0.0, kept_bytes=4.0, bytes_per_vector=8.0),
}


def product_with_bias(inner: float, columns: float, *, divided: str, bias: bool) -> tuple[Matmul, Amount]:
    """Return the product of all tokens with a weight, and its parameters with those of its bias."""
    product = token_product(inner, columns, divided=divided)
    weight = Amount.of(inner * columns, tensor=int(bool(divided)))
    # Ranks that divide the inner side add the whole bias to the sum of their results.
    added = Amount.of(columns, tensor=int(divided == "columns")) if bias else ZERO
    return product, weight + added
