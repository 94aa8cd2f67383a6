"""The products of a layer that are converted: those of a block with a weight whose sides 16 divides.

Matrix units take fp8 operands in pieces of 16 bytes. Embeddings, heads and norms stay in the training's
precision, as torchao and torchtitan advise.
"""

from __future__ import annotations

from weft.describe.amount import Shape
from weft.describe.layer import FP8_PRODUCT, PLAIN_PRODUCT, Layer, Matmul

MULTIPLE = 16
_ONE = Shape(1, 1)


def converted(layer: Layer) -> tuple[Matmul, ...]:
    """Return the products of a layer's forward pass that can be converted, or already are; () for no block.

    Blocks are those of transformers, and the layers of a user's `BlockModel`.
    """
    if layer.kind != "block" and not layer.name.startswith("layer."):
        return ()
    return tuple(one for one in layer.forward.matmuls if _fits(one))


def _fits(product: Matmul) -> bool:
    if product.kernel not in (PLAIN_PRODUCT, FP8_PRODUCT) or product.count(_ONE) != 1.0:
        return False
    return all(side(_ONE) % MULTIPLE == 0 for side in (product.inner, product.columns))
