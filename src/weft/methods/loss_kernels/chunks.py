"""The tokens of a chunk, whose logits exist at once."""

from __future__ import annotations

from weft.describe.layer_choices import Value
from weft.describe.loss_choice import BY_SIZE

# Smaller chunks spend more time on sums of the matrix's gradient than on products; more than `ENOUGH` tokens
# are only worth it where they cost no memory. As measured by `benchmarks/loss_head.py`.
FEWEST, ENOUGH = 256, 512


def chunk_tokens(value: Value, width: int) -> int:
    """Return the tokens of a chunk; `value` gives them, or says "by size".

    By size, a chunk's logits have about half as many elements as the matrix, or as many in narrow models. The
    gradient of the matrix stays until the backward pass, which takes as much again. So smaller chunks would
    not lower the peak.
    """
    return int(value) if value != BY_SIZE else max(FEWEST, width // 2, min(ENOUGH, width))
