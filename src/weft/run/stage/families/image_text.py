"""Stages of a model of images and texts, whose head tells whether the two belong together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers.models.vit.modeling_vit import ViTLayer

from weft.describe.families.clip import sizes_of, text_side
from weft.describe.model import ModelConfig, image_tokens
from weft.run.stage.families.convolution import as_computed
from weft.run.stage.families.graph_family import GraphFamilyStage
from weft.run.stage.families.multimodal import TokenEmbedding
from weft.run.stage.families.vit import vit_config
from weft.run.stage.stage_module import Initial


class PatchEmbedding(nn.Module):
    """Patches of an image as tokens behind a class token, with learned positions and a norm."""

    def __init__(self, config: ModelConfig, epsilon: float) -> None:
        super().__init__()
        width, size = config.hidden, config.patch_size
        self.patches = nn.Conv2d(config.channels, width, size, stride=size, bias=False)
        self.class_token = nn.Parameter(torch.zeros(width))
        self.positions = nn.Embedding(image_tokens(config.image_size, size), width)
        self.norm = nn.LayerNorm(width, epsilon)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the stream (b, tokens, hidden) of pixels (b, channels, size, size)."""
        patches = self.patches(as_computed(pixels, self)).flatten(2).transpose(1, 2)
        first = self.class_token.expand(len(patches), 1, -1)
        stream: torch.Tensor = self.norm(torch.cat([first, patches], 1) + self.positions.weight)
        return stream


class Projection(nn.Module):
    """A norm of the first token, and its product with the common space."""

    def __init__(self, width: int, columns: int, epsilon: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, epsilon)
        self.product = nn.Linear(width, columns, bias=False)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Return (b, projection) of a stream (b, tokens, width)."""
        vector: torch.Tensor = self.product(self.norm(stream[:, 0]))
        return vector


class MatchingHead(nn.Module):
    """The log-odds that an image and a text belong together: the scaled product of vectors, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Return (b, 1) of two vectors (b, projection)."""
        scale: float = image.shape[1] ** -0.5
        return (image * text).sum(1, keepdim=True) * scale + self.bias


class ImageTextStage(GraphFamilyStage):
    """The image tower reads pixels, the text tower tokens (b, s); the output is (b, 1)."""

    def __init__(self, config: ModelConfig, layers: Sequence[int]) -> None:
        self._image, self._text = vit_config(config), vit_config(text_side(config))
        super().__init__(config, layers)

    @staticmethod
    def sample_shape(config: ModelConfig, layer: str) -> tuple[int, ...]:
        if layer == "head":
            return (1,)
        if layer.endswith("projection"):
            return (sizes_of(config).projection,)
        if layer.startswith("text"):
            return (config.sequence, sizes_of(config).text_hidden)
        return (image_tokens(config.image_size, config.patch_size), config.hidden)

    def make(self, layer: str, number: int, inner: int) -> nn.Module:
        config, of_text = self.config, layer.startswith("text")
        own, epsilon = self._text if of_text else self._image, self._image.layer_norm_eps
        if layer == "head":
            return MatchingHead()
        if layer.endswith("projection"):
            return Projection(inner, sizes_of(config).projection, epsilon)
        if layer == "image.embedding":
            return PatchEmbedding(config, epsilon)
        if layer == "text.embedding":
            return TokenEmbedding(config.vocabulary, config.sequence, own.hidden_size)
        return ViTLayer(own)

    def initial(self, name: str) -> Initial:
        if "norm" in name:
            return Initial(mean=1.0 if name.endswith("weight") else 0.0)
        if name.endswith("product.weight"):
            # As of CLIP; smaller vectors would begin near a saddle of their product.
            return Initial(deviation=self.get_parameter(name).shape[1] ** -0.5)
        return Initial() if name.endswith("bias") else Initial(deviation=self._image.initializer_range)
