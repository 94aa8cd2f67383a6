"""The cost of a block with an attention window.

Queries are cut into chunks of w tokens, as long as the window. A chunk reads its own keys and the keys of the
window before it, under a mask. For w < s tokens this computes `(s / w - 1) w (2 w - 1) + w^2` scores of s^2;
a causal kernel computes half of s^2. The joined outputs of the chunks are kept, too.
"""

from __future__ import annotations

from dataclasses import replace

from weft.describe.amount import Amount
from weft.describe.layer import Layer, Matmul, PassWork
from weft.describe.layer_choices import LayerOption, Value
from weft.methods.attention_window.options import NAME

CAUSAL, MASKED = "flash2-causal", "flash2"


def refuse(layer: Layer, value: Value) -> str | None:
    if not any(product.kernel == CAUSAL for product in layer.forward.matmuls):
        return f"{layer.name} has no attention to the tokens before"
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        return f"{value!r} tokens; at least 1 is needed"
    return None


def changed(layer: Layer, value: Value, sequence: int) -> Layer:
    """Return the block with a window of `value` tokens, for samples of `sequence` tokens."""
    window = int(value)
    if window >= sequence:
        return layer
    chunks = -(-sequence // window)
    share = ((chunks - 1) * window * (2 * window - 1) + window * window) / sequence**2
    attended = next(product for product in layer.forward.matmuls if product.kernel == CAUSAL)
    joined: Amount = attended.count * attended.rows * attended.inner
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


OPTION = LayerOption(name=NAME, refuse=refuse, changed=changed)
