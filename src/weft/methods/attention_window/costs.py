"""The cost of a block with an attention window."""

from __future__ import annotations

from weft.describe.layer import Layer
from weft.describe.layer_choices import LayerOption, Value
from weft.describe.windows import CAUSAL, windowed
from weft.methods.attention_window.options import NAME


def refuse(layer: Layer, value: Value) -> str | None:
    if not any(product.kernel == CAUSAL for product in layer.forward.matmuls):
        return f"{layer.name} has no attention to the tokens before"
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        return f"{value!r} tokens; at least 1 is needed"
    return None


def changed(layer: Layer, value: Value, sequence: int) -> Layer:
    """Return the block with a window of `value` tokens, for samples of `sequence` tokens."""
    return windowed(layer, int(value), sequence)


OPTION = LayerOption(name=NAME, refuse=refuse, changed=changed)
