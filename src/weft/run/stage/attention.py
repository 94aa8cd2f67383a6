"""The registry of weft's own attention for modules of `transformers`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import AttentionInterface

# From the attention module, its queries, keys and values, (b, heads, tokens, head size), and the scale of
# their products to the attention output, (b, tokens, heads, head size).
Attend = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def register_attention(name: str, attend: Attend) -> None:
    """Let modules with the `_attn_implementation` `name` use `attend`, without padding masks or dropout."""

    def call(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float,
        dropout: float = 0.0,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        assert attention_mask is None, "samples are whole windows, without padding"
        assert dropout == 0.0, "the families train without dropout"
        return attend(module, query, key, value, scaling), None

    AttentionInterface.register(name, call)
