"""Attention of each token to itself and the tokens of a window before it (Beltagy et al., arXiv 2004.05150).

Queries are cut into chunks as long as the window. Each chunk reads only its own keys and the keys of the
window before it. This needs no special kernel, and computes no scores outside of a chunk's keys.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from weft.run.stage.attention import attend_causally, causal_attention, register_attention, use_attention

# The name of this attention for the modules of `transformers`.
_INTERFACE = "weft_window"
# Queries, keys and values are (samples, heads, tokens, head size).
_TOKENS = 2


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, window: int, scale: float
) -> torch.Tensor:
    """Return each token's attention to itself and the `window` - 1 before it: (b, tokens, heads, head size).

    Args:
        queries, keys, values: (b, heads, tokens, head size); keys and values may have fewer heads.
    """
    tokens, grouped = queries.shape[_TOKENS], queries.shape[1] != keys.shape[1]
    if window >= tokens:
        return attend_causally(queries, keys, values, scale)
    mask = _band(window, queries.device)
    parts = []
    for first in range(0, tokens, window):
        size, seen = min(window, tokens - first), min(window - 1, first)
        part = scaled_dot_product_attention(
            queries.narrow(_TOKENS, first, size),
            keys.narrow(_TOKENS, first - seen, size + seen),
            values.narrow(_TOKENS, first - seen, size + seen),
            attn_mask=mask[:size, window - 1 - seen : window - 1 + size],
            scale=scale,
            enable_gqa=grouped,
        )
        parts.append(part.transpose(1, 2))
    return torch.cat(parts, 1)


def give_window(block: nn.Module, tokens: int) -> None:
    """Set the attention window of a block of `transformers`, in tokens."""
    for part in causal_attention(block):
        use_attention(part, _INTERFACE)
        part.attention_window = tokens  # type: ignore[attr-defined]  # a module takes any attribute


def causal_mask(tokens: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """Return the summand of scores, (1, 1, tokens, tokens), for attention to the tokens before.

    Args:
        window: the tokens that each one attends to, itself included; 0 for all before it.
        like: a tensor with the precision and the device of the mask.
    """
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=like.device).tril()
    if window:
        seen = seen.triu(1 - window)
    mask = torch.zeros(tokens, tokens, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~seen, torch.finfo(like.dtype).min)[None, None]


def _band(window: int, device: torch.device) -> torch.Tensor:
    """Return the mask, (w, 2 w - 1), of the keys that queries read; the last key is the last query's."""
    every = torch.ones(window, 2 * window - 1, dtype=torch.bool, device=device)
    return every.tril(window - 1).triu(0)


def _attend(
    module: nn.Module, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    window: int = module.attention_window  # type: ignore[assignment]
    return attend(queries, keys, values, window=window, scale=scale)


register_attention(_INTERFACE, _attend)
