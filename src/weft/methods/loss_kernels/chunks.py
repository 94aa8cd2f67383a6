"""The chunks of tokens whose logits exist at once."""

from __future__ import annotations

from weft.describe.layer_choices import Value
from weft.describe.loss_choice import BY_SIZE


def chunk_count(vocabulary: int, width: int) -> int:
    """Return the number of chunks by size, the power of two at or above vocabulary / width.

    The logits of a chunk then have about as many elements as the vectors of all tokens. The rule is that of
    Liger Kernel (Hsu et al., arXiv 2410.10989, section 3.2).
    """
    return 1 << (-(-vocabulary // width) - 1).bit_length()


def chunk_tokens(value: Value, tokens: int, width: int, *, vocabulary: int) -> int:
    """Return the tokens of a chunk for `tokens` on a rank; `value` gives them, or says "by size"."""
    if value != BY_SIZE:
        return int(value)
    return max(1, -(-tokens // chunk_count(vocabulary, width)))
