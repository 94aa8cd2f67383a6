"""The tokens of a chunk, whose logits exist at once."""

from __future__ import annotations

from weft.describe.layer_choices import Value
from weft.describe.loss_choice import BY_SIZE

# Smaller chunks spend more time on reads of the matrix than on products.
FEWEST = 256


def chunk_tokens(value: Value, width: int) -> int:
    """Return the tokens of a chunk; `value` gives them, or says "by size".

    By size, a chunk's logits have at most half as many elements as the matrix. Its gradient stays until the
    backward pass, which takes as much again, so smaller chunks would not lower the peak. Half leaves room for
    logits in two precisions.
    """
    return int(value) if value != BY_SIZE else max(FEWEST, width // 2)
