"""Stages of a residual network, made from the blocks of `transformers`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import ResNetConfig
from transformers.models.resnet.modeling_resnet import (
    ResNetBasicLayer,
    ResNetBottleNeckLayer,
    ResNetEmbeddings,
)

from weft.describe.families.resnet import NARROWED, group_and_depth, sample_shapes, stride_of
from weft.describe.model import ModelConfig
from weft.run.stage.batch_norm import use_step_batch_norms
from weft.run.stage.families.convolution import ConvolutionalStage, as_computed
from weft.run.stage.layers import LayerFunction
from weft.run.stage.submodules import Submodules


def resnet_config(config: ModelConfig) -> ResNetConfig:
    """Return the `transformers` configuration of a model; the size of the images is a key of weft's own."""
    sizes = config.convolutions
    assert sizes is not None, "a residual network has convolutions"
    return ResNetConfig(  # type: ignore[call-arg]  # keys of all families are not among its types
        num_channels=config.channels,
        embedding_size=config.hidden,
        hidden_sizes=list(sizes.widths),
        depths=list(sizes.depths),
        layer_type="bottleneck" if sizes.bottleneck else "basic",
        num_labels=config.vocabulary,
        image_size=config.image_size,
    )


class _Group(nn.Module):
    """A stage's part of one of `resnet.encoder.stages`."""

    layers: Submodules[ResNetBasicLayer | ResNetBottleNeckLayer]


class _ResNetEncoder(nn.Module):
    """A stage's part of `resnet.encoder`."""

    stages: Submodules[_Group]


class _ResNet(nn.Module):
    """A stage's part of `resnet`."""

    embedder: ResNetEmbeddings
    encoder: _ResNetEncoder


class ResNetStage(ConvolutionalStage):
    """Blocks of any groups; batch norms are `StepBatchNorm`."""

    head = "classifier.1"
    sample_shapes = staticmethod(sample_shapes)

    def __init__(self, config: ModelConfig, layers: Sequence[int]) -> None:
        super().__init__(config, layers)
        self.resnet = _ResNet()
        if self.embeds:
            self.resnet.embedder = ResNetEmbeddings(resnet_config(config))
        self.resnet.encoder = _ResNetEncoder()
        self.resnet.encoder.stages = Submodules()
        for index in self.block_indices:
            self._add_block(index)
        if self.ends:
            assert config.convolutions is not None
            self.classifier = nn.Sequential(
                nn.Flatten(), nn.Linear(config.convolutions.widths[-1], config.vocabulary)
            )
        use_step_batch_norms(self)

    def layer_functions(self, inputs: torch.Tensor) -> list[LayerFunction]:
        """Return layers from pixels or maps (b, channels, size, size) to maps or logits (b, classes)."""
        functions: list[LayerFunction] = [self._embed] if self.embeds else []
        for group in self.resnet.encoder.stages.values():
            functions += group.layers.values()
        return [*functions, self._head] if self.ends else functions

    def _add_block(self, index: int) -> None:
        sizes = self.config.convolutions
        assert sizes is not None
        group, depth = group_and_depth(self.config, index)
        before = (self.config.hidden, *sizes.widths)[group if depth == 0 else group + 1]
        width, stride = sizes.widths[group], stride_of(group, depth)
        block = (
            ResNetBottleNeckLayer(before, width, stride=stride, reduction=NARROWED)
            if sizes.bottleneck
            else ResNetBasicLayer(before, width, stride=stride)
        )
        groups = self.resnet.encoder.stages
        if str(group) not in groups:
            groups[str(group)] = _Group()
            groups[str(group)].layers = Submodules()
        groups[str(group)].layers[str(depth)] = block

    def _embed(self, pixels: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.resnet.embedder(as_computed(pixels, self.resnet.embedder))
        return embedded

    def _head(self, maps: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(nn.functional.adaptive_avg_pool2d(maps, 1))
        return logits
