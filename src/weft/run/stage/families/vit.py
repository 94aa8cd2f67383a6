"""Stages of a vision transformer, made from the blocks of `transformers`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import nn
from transformers import ViTConfig
from transformers.models.vit.modeling_vit import ViTEmbeddings, ViTLayer

from weft.describe.model import ModelConfig
from weft.run.parallel.tensor_layers import HeldByTensorRanks
from weft.run.stage.layers import LayerFunction
from weft.run.stage.pieces import Branch, plain_branch
from weft.run.stage.stage_module import Initial, StageModule
from weft.run.stage.submodules import Submodules


def vit_config(config: ModelConfig) -> ViTConfig:
    """Return the `transformers` configuration of a model, without dropout and with fused attention."""
    return ViTConfig(  # type: ignore[call-arg]  # keys of all families are not among its types
        hidden_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=config.feed_forward,
        image_size=config.image_size,
        patch_size=config.patch_size,
        num_channels=config.channels,
        num_labels=config.vocabulary,
        layer_norm_eps=1e-12 if config.norm_epsilon is None else config.norm_epsilon,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )


class _ViT(nn.Module):
    """A stage's part of `vit`."""

    embeddings: ViTEmbeddings
    layers: Submodules[ViTLayer]
    layernorm: nn.LayerNorm


class ViTStage(StageModule):
    """The first stage reads pixels (b, channels, size, size), the last one returns logits (b, classes).

    Tensor ranks divide the blocks; each computes patches, and the classes of the class token, in full.
    """

    held = MappingProxyType(
        {
            "q_proj.weight": HeldByTensorRanks(axis=0),
            "q_proj.bias": HeldByTensorRanks(axis=0),
            "k_proj.weight": HeldByTensorRanks(axis=0),
            "k_proj.bias": HeldByTensorRanks(axis=0),
            "v_proj.weight": HeldByTensorRanks(axis=0),
            "v_proj.bias": HeldByTensorRanks(axis=0),
            "o_proj.weight": HeldByTensorRanks(axis=1),
            "fc1.weight": HeldByTensorRanks(axis=0),
            "fc1.bias": HeldByTensorRanks(axis=0),
            "fc2.weight": HeldByTensorRanks(axis=1),
            "classifier.weight": HeldByTensorRanks(on_stream=False),
            "classifier.bias": HeldByTensorRanks(on_stream=False),
        }
    )
    regions = ("attention", "mlp")
    region_ends = ("attention.o_proj", "mlp.fc2")

    def __init__(self, config: ModelConfig, layers: Sequence[int]) -> None:
        super().__init__(config, layers)
        hugging_face = vit_config(config)
        self.initializer_range = hugging_face.initializer_range
        self.vit = _ViT()
        if self.embeds:
            self.vit.embeddings = ViTEmbeddings(hugging_face)
        self.vit.layers = Submodules({str(index): ViTLayer(hugging_face) for index in self.block_indices})
        if self.ends:
            self.vit.layernorm = nn.LayerNorm(config.hidden, eps=hugging_face.layer_norm_eps)
            self.classifier = nn.Linear(config.hidden, config.vocabulary)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return list(self.vit.layers.values())

    def initial(self, name: str) -> Initial:
        if "layernorm" in name:
            return Initial(mean=1.0 if name.endswith("weight") else 0.0)
        return Initial() if name.endswith("bias") else Initial(deviation=self.initializer_range)

    def layer_functions(self, inputs: torch.Tensor) -> list[LayerFunction]:
        """Return layers from pixels or states (b, s, hidden) to hidden states or logits (b, classes)."""
        functions: list[LayerFunction] = [self._embed] if self.embeds else []
        functions += self.vit.layers.values()
        return [*functions, self._head] if self.ends else functions

    def input_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        if not self.embeds:
            return super().input_shape(micro_batch_size, sequence)
        size = self.config.image_size
        return (micro_batch_size, self.config.channels, size, size)

    def output_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        if not self.ends:
            return super().output_shape(micro_batch_size, sequence)
        return (micro_batch_size, self.config.vocabulary)

    def branches(self, inputs: torch.Tensor) -> Iterator[Branch]:
        for layer in self.vit.layers.values():
            attention, mlp = layer.attention, layer.mlp
            attend = partial(_attend, attention)
            yield plain_branch(layer.layernorm_before, attend, attention.o_proj)
            yield plain_branch(layer.layernorm_after, mlp, mlp.fc2)

    def _embed(self, pixels: torch.Tensor) -> torch.Tensor:
        # Pixels come in one precision for all models.
        embedded: torch.Tensor = self.vit.embeddings(pixels.to(self.vit.embeddings.cls_token.dtype))
        return self.tensor.own_tokens(embedded)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = self.tensor.whole_stream(self.vit.layernorm(hidden))
        logits: torch.Tensor = self.classifier(tokens[:, 0])
        return logits


def _attend(attention: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = attention(hidden)[0]
    return output
