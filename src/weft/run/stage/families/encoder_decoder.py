"""Stages of a transformer with encoder and decoder: blocks of `transformers`' vision transformer encode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional
from transformers.models.vit.modeling_vit import ViTLayer

from weft.describe.model import ModelConfig
from weft.run.stage.families.graph_family import GraphFamilyStage
from weft.run.stage.families.multimodal import TokenEmbedding
from weft.run.stage.families.vit import vit_config
from weft.run.stage.stage_module import Initial


class Attention(nn.Module):
    """Fused attention of a stream's queries to the keys and values of the same or another stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, stream: torch.Tensor, read: torch.Tensor, *, causal: bool) -> torch.Tensor:
        """Return (b, s, hidden) of two streams of that shape."""
        queries, keys, values = self.q_proj(stream), self.k_proj(read), self.v_proj(read)
        found = functional.scaled_dot_product_attention(
            self._by_head(queries), self._by_head(keys), self._by_head(values), is_causal=causal
        )
        output: torch.Tensor = self.o_proj(found.transpose(1, 2).flatten(2))
        return output

    def _by_head(self, vectors: torch.Tensor) -> torch.Tensor:
        samples, tokens, width = vectors.shape
        return vectors.view(samples, tokens, self._heads, width // self._heads).transpose(1, 2)


class DecoderBlock(nn.Module):
    """Attention to earlier tokens, attention to the encoder's output, a feed-forward; a norm before each."""

    def __init__(self, config: ModelConfig, epsilon: float) -> None:
        super().__init__()
        width = config.hidden
        self.norm, self.attention = nn.LayerNorm(width, epsilon), Attention(width, config.heads)
        self.cross_norm, self.cross_attention = nn.LayerNorm(width, epsilon), Attention(width, config.heads)
        self.last_norm = nn.LayerNorm(width, epsilon)
        self.fc1 = nn.Linear(width, config.feed_forward)
        self.fc2 = nn.Linear(config.feed_forward, width)

    def forward(self, memory: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """Return the stream (b, s, hidden) behind the block; `memory` is the encoder's output."""
        normed = self.norm(stream)
        stream = stream + self.attention(normed, normed, causal=True)
        stream = stream + self.cross_attention(self.cross_norm(stream), memory, causal=False)
        inside: torch.Tensor = self.fc2(functional.gelu(self.fc1(self.last_norm(stream))))
        return stream + inside


class VocabularyHead(nn.Module):
    """The decoder's last norm, and a product with the vocabulary."""

    def __init__(self, config: ModelConfig, epsilon: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden, epsilon)
        self.vocabulary = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Return logits (b, s, vocabulary)."""
        logits: torch.Tensor = self.vocabulary(self.norm(stream))
        return logits


class EncoderDecoderStage(GraphFamilyStage):
    """Both sides read tokens (b, s); the last layer returns logits (b, s, vocabulary)."""

    def __init__(self, config: ModelConfig, layers: Sequence[int]) -> None:
        self._hugging_face = vit_config(config)
        super().__init__(config, layers)

    @staticmethod
    def sample_shape(config: ModelConfig, layer: str) -> tuple[int, ...]:
        return (config.sequence, config.vocabulary if layer == "head" else config.hidden)

    def make(self, layer: str, number: int, inner: int) -> nn.Module:
        config, epsilon = self.config, self._hugging_face.layer_norm_eps
        if layer == "head":
            return VocabularyHead(config, epsilon)
        if layer == "encoder.norm":
            return nn.LayerNorm(config.hidden, epsilon)
        if layer.endswith("embedding"):
            return TokenEmbedding(config.vocabulary, config.sequence, config.hidden)
        return ViTLayer(self._hugging_face) if layer.startswith("encoder") else DecoderBlock(config, epsilon)

    def initial(self, name: str) -> Initial:
        if "norm" in name:
            return Initial(mean=1.0 if name.endswith("weight") else 0.0)
        return Initial() if name.endswith("bias") else Initial(deviation=self._hugging_face.initializer_range)
