"""Attention of one context rank's tokens to the tokens of all ranks.

Each rank gathers the keys and values of all, and reduces and scatters their gradients (all-gather form: Llama
3, arXiv 2407.21783, section 3.3.2). A ring (Liu et al., arXiv 2310.01889) holds less memory and exchanges
more often. With causal attention a chunk of queries reads no later keys. So a rank computes its own tokens'
scores only, and wastes at most the masked part of one chunk's square.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig

from weft.run.parallel.context.ranks import ContextRanks
from weft.run.parallel.function import Function
from weft.run.stage.attention import register_attention

# Under this name the modules of `transformers` find the attention that gathers.
_NAME = "weft_context"
# Queries, keys and values are (samples, heads, tokens, head size).
_TOKENS = 2


class ContextAttention:
    """The attention of one stage's layers on one of the ranks that divide the tokens."""

    def __init__(self, ranks: ContextRanks) -> None:
        self._ranks = ranks
        self._mask: torch.Tensor | None = None

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool, scale: float
    ) -> torch.Tensor:
        """Return the attention output of the own tokens, (b, own tokens, heads, head size).

        Args:
            queries, keys, values: those of the own tokens, (b, heads, own tokens, head size); there may be
                fewer heads of keys and values than of queries.
        """
        keys, values = _KeysAndValues.apply(keys, values, self._ranks)
        grouped = queries.shape[1] != keys.shape[1]
        if not causal:
            attended = scaled_dot_product_attention(queries, keys, values, scale=scale, enable_gqa=grouped)
            return attended.transpose(1, 2)
        ranks, size = self._ranks, queries.shape[_TOKENS] // 2
        chunks = zip((ranks.place, 2 * ranks.size - 1 - ranks.place), queries.chunk(2, _TOKENS), strict=True)
        parts = []
        for chunk, own in chunks:
            seen = (chunk + 1) * size
            part = scaled_dot_product_attention(
                own,
                keys.narrow(_TOKENS, 0, seen),
                values.narrow(_TOKENS, 0, seen),
                attn_mask=self._lower_right(size, seen, keys),
                scale=scale,
                enable_gqa=grouped,
            )
            parts.append(part.transpose(1, 2))
        return torch.cat(parts, 1)

    def _lower_right(self, queries: int, keys: int, like: torch.Tensor) -> torch.Tensor:
        """Build a mask that lets the last query see all keys, and each query before it one key less."""
        if like.device.type != "cpu":
            return causal_lower_right(queries, keys)
        # CPU kernels read masks, and autograd would keep one per call. All are views of this one.
        longest = 2 * self._ranks.size * queries
        kept = self._mask
        if kept is None or kept.shape != (queries, longest) or kept.dtype != like.dtype:
            kept = torch.full((queries, longest), -torch.inf, dtype=like.dtype).triu(1 + longest - queries)
            self._mask = kept
        return kept[:, longest - keys :]


def spread_tokens(module: nn.Module, ranks: ContextRanks) -> None:
    """Let all attention inside a module read the tokens of all ranks."""
    attention = ContextAttention(ranks)
    for part in module.modules():
        if _attends(part):
            part.config._attn_implementation = _NAME
            part.context_attention = attention


class _Spread(Protocol):
    """An attention module of `transformers` in a stage with divided tokens."""

    config: PreTrainedConfig
    context_attention: ContextAttention


def _attends(part: nn.Module) -> TypeGuard[_Spread]:
    return hasattr(part, "is_causal")


def _attend(
    module: nn.Module, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    attention: ContextAttention = module.context_attention  # type: ignore[assignment]
    return attention(queries, keys, values, causal=bool(module.is_causal), scale=scale)


class _KeysAndValues(Function):
    """A gather of all ranks' keys and values in one exchange; backward makes another."""

    @staticmethod
    def forward(
        ctx: Any, keys: torch.Tensor, values: torch.Tensor, ranks: ContextRanks
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.ranks = ranks
        both = ranks.joined(ranks.gather(torch.stack([keys, values])), 1 + _TOKENS)
        return both[0], both[1]

    @staticmethod
    def backward(
        ctx: Any, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        ranks: ContextRanks = ctx.ranks
        both = torch.stack([keys, values])
        shares = [ranks.own_tokens(both, 1 + _TOKENS, place) for place in range(ranks.size)]
        own = ranks.scatter_sum(torch.stack(shares))
        return own[0], own[1], None


register_attention(_NAME, _attend)
