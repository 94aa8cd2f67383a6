"""Model families: each converts the sizes of a model to a graph of costed layers.

A new family is one file with a function ``layer_graph(config) -> LayerGraph`` and one line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache

from weft.describe.decoder_row import ROWS
from weft.describe.families import (
    alexnet,
    bert,
    captured,
    clip,
    decoder,
    encoder_decoder,
    feature_towers,
    gpt,
    multimodal,
    own,
    resnet,
    vgg,
    vit,
)
from weft.describe.layer import Layer
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig
from weft.errors import require_choice

FAMILIES: Mapping[str, Callable[[ModelConfig], LayerGraph]] = {
    "gpt": gpt.layer_graph,
    "bert": bert.layer_graph,
    "vit": vit.layer_graph,
    "resnet": resnet.layer_graph,
    "vgg": vgg.layer_graph,
    "alexnet": alexnet.layer_graph,
    "multimodal-transformer": multimodal.layer_graph,
    "encoder-decoder": encoder_decoder.layer_graph,
    "clip": clip.layer_graph,
    "image-text": clip.layer_graph,
    "t5": encoder_decoder.layer_graph,
    "dlrm": feature_towers.layer_graph,
    "candle-uno": feature_towers.layer_graph,
    own.FAMILY: own.layer_graph,
    captured.FAMILY: captured.layer_graph,
    **dict.fromkeys(ROWS, decoder.layer_graph),
}


def layer_graph(config: ModelConfig) -> LayerGraph:
    """Return the costed layers of a model: ``embedding``, ``block.0`` and so on, ``head``.

    VGG and AlexNet have ``convolution.0`` and so on, ``linear.0`` and so on. Models of towers have
    ``tower.0.block.0``, ``dense.0.linear.0``, ``table.0`` and so on. Equal sizes have one graph, which keeps
    its costs. A user's own model is built each time.

    Raises:
        InputError: when the family is unknown.
    """
    return _made(config) if config.family == own.FAMILY else _kept(config)


@lru_cache(maxsize=64)
def _kept(config: ModelConfig) -> LayerGraph:
    return _made(config)


def _made(config: ModelConfig) -> LayerGraph:
    if config.decoder is None:
        require_choice("model family", config.family, FAMILIES)
    # A type without a row may describe its own decoder.
    graph = FAMILIES.get(config.family, decoder.layer_graph)(config)
    # Equal layers share their passes, so that cost models recognise them by identity.
    shared: dict[tuple[int, ...], Layer] = {}
    known: dict[Layer, Layer] = {}
    for layer in graph.layers:
        if layer.parts not in shared:
            shared[layer.parts] = known.setdefault(replace(layer, name=""), layer)
    layers = (replace(shared[layer.parts], name=layer.name) for layer in graph.layers)
    return replace(graph, layers=tuple(layers))
