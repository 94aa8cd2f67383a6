"""weft's own attention for modules of `transformers`: a registry, and attention inside documents."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Protocol, TypeGuard

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig

from weft.run.stage.documents import Documents

# From the attention module, its queries, keys and values, (b, heads, tokens, head size), and the scale of
# their products to the attention output, (b, tokens, heads, head size).
Attend = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]

# Names of attention: torch's fused one, and the same inside documents.
_FUSED, _IN_DOCUMENTS = "sdpa", "weft_documents"


def register_attention(name: str, attend: Attend) -> None:
    """Let modules with the `_attn_implementation` `name` use `attend`, without padding masks or dropout.

    Where their mask is `Documents`, they attend inside each document.
    """

    def call(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | Documents | None,
        *,
        scaling: float,
        dropout: float = 0.0,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        assert dropout == 0.0, "the families train without dropout"
        if isinstance(attention_mask, Documents):
            return attention_mask.attend(
                lambda queries, keys, values: attend(module, queries, keys, values, scaling),
                query,
                key,
                value,
            ), None
        assert attention_mask is None, "samples are whole windows, without padding"
        return attend(module, query, key, value, scaling), None

    AttentionInterface.register(name, call)


def attend_causally(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return each token's attention to itself and all tokens before; shapes and scale as in `Attend`."""
    grouped = queries.shape[1] != keys.shape[1]
    attended = scaled_dot_product_attention(
        queries, keys, values, is_causal=True, scale=scale, enable_gqa=grouped
    )
    return attended.transpose(1, 2)


class CausalAttention(Protocol):
    """An attention module of `transformers`, as weft changes it."""

    config: PreTrainedConfig


def causal_attention(block: nn.Module) -> Iterator[CausalAttention]:
    """Yield the modules of a block that attend to the tokens before."""
    return (part for part in block.modules() if _attends_causally(part))


def use_attention(part: CausalAttention, name: str) -> None:
    """Let one module use the attention that is registered under this name."""
    # Blocks share one configuration, but each has its own attention.
    part.config = copy.copy(part.config)
    part.config._attn_implementation = name


def give_documents(block: nn.Module) -> None:
    """Let a block attend inside the documents that it gets in place of a mask.

    Other attention of weft's own does so already. Kernels that store scores get a mask.
    """
    for part in causal_attention(block):
        if part.config._attn_implementation == _FUSED:
            use_attention(part, _IN_DOCUMENTS)


def _attends_causally(part: nn.Module) -> TypeGuard[CausalAttention]:
    # Attention to chosen tokens takes a mask, and makes another one of it.
    return getattr(part, "is_causal", False) and not hasattr(part, "indexer")


register_attention(_IN_DOCUMENTS, lambda module, *given: attend_causally(*given))
