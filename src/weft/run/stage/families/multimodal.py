"""Stages of a multi-modal transformer: blocks of `transformers`' vision transformer in every tower."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers.models.vit.modeling_vit import ViTLayer

from weft.describe.families.multimodal import towers_of
from weft.describe.model import ModelConfig
from weft.run.stage.families.graph_family import GraphFamilyStage
from weft.run.stage.families.vit import vit_config
from weft.run.stage.stage_module import Initial


class TokenEmbedding(nn.Module):
    """A tower's table of tokens, and learned positions."""

    def __init__(self, tokens: int, sequence: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.positions = nn.Embedding(sequence, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the stream (b, s, hidden) of tokens (b, s)."""
        stream: torch.Tensor = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return stream


class JointHead(nn.Module):
    """A norm of the concatenated streams, their mean over the tokens, and a product with the classes."""

    def __init__(self, width: int, classes: int, epsilon: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=epsilon)
        self.classifier = nn.Linear(width, classes)

    def forward(self, *streams: torch.Tensor) -> torch.Tensor:
        """Return logits (b, classes) of streams (b, s, hidden)."""
        logits: torch.Tensor = self.classifier(self.norm(torch.cat(streams, -1)).mean(1))
        return logits


class MultimodalStage(GraphFamilyStage):
    """Each tower reads tokens (b, s) of its own; the last layer returns logits (b, classes)."""

    def __init__(self, config: ModelConfig, layers: Sequence[int]) -> None:
        self._hugging_face = vit_config(config)
        super().__init__(config, layers)

    @staticmethod
    def sample_shape(config: ModelConfig, layer: str) -> tuple[int, ...]:
        return (config.vocabulary,) if layer == "head" else (config.sequence, config.hidden)

    def make(self, layer: str, number: int, inner: int) -> nn.Module:
        config, epsilon = self.config, self._hugging_face.layer_norm_eps
        if layer == "head":
            return JointHead(inner, config.vocabulary, epsilon)
        if layer.endswith("embedding"):
            return TokenEmbedding(towers_of(config).tokens[number], config.sequence, config.hidden)
        return ViTLayer(self._hugging_face)

    def initial(self, name: str) -> Initial:
        if "norm" in name:
            return Initial(mean=1.0 if name.endswith("weight") else 0.0)
        return Initial() if name.endswith("bias") else Initial(deviation=self._hugging_face.initializer_range)
