"""The work of attention to a window of tokens, in chunks of queries as long as the window.

A chunk reads its own keys and the keys of the window before it, under a mask. For w < s tokens this computes
`(s / w - 1) w (2 w - 1) + w^2` scores of s^2; a causal kernel computes half of s^2. The joined outputs of the
chunks are kept, too.
"""

from __future__ import annotations

from dataclasses import replace

from weft.describe.amount import Amount
from weft.describe.layer import Layer, Matmul, PassWork

CAUSAL, MASKED = "flash2-causal", "flash2"


def windowed(layer: Layer, window: int, sequence: int) -> Layer:
    """Return a block with causal attention, with a window of tokens for samples of `sequence` tokens."""
    if window >= sequence:
        return layer
    chunks = -(-sequence // window)
    share = ((chunks - 1) * window * (2 * window - 1) + window * window) / sequence**2
    attended = [product for product in layer.forward.matmuls if product.kernel == CAUSAL]
    # The second product of attention makes its output.
    joined: Amount = attended[-1].count * attended[-1].rows * attended[-1].columns
    return replace(
        layer,
        kept=layer.kept + joined,
        forward=_windowed(layer.forward, share, chunks),
        backward_input=_windowed(layer.backward_input, share, chunks),
    )


def _windowed(work: PassWork, share: float, chunks: int) -> PassWork:
    attention = [product for product in work.matmuls if product.kernel == CAUSAL]
    matmuls = tuple(_masked(one, share) if one.kernel == CAUSAL else one for one in work.matmuls)
    return replace(work, matmuls=matmuls, kernels=work.kernels + (chunks - 1) * len(attention))


def _masked(product: Matmul, share: float) -> Matmul:
    return replace(product, count=share * product.count, kernel=MASKED)
