"""The layers that a job trains: the model's layers with the additions of methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from weft.bundles import parts
from weft.describe.families import layer_graph
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig
from weft.describe.plan import Choice


@dataclass(frozen=True, kw_only=True)
class AddedLayers:
    """The additions of a method to the layers of models; a method contributes it.

    `add` takes the current layers, the model's sizes and the method's options. It keeps the positions of
    layers: the stage of a layer also prices, steps and keeps the layer's additions.
    """

    method: str
    add: Callable[[LayerGraph, ModelConfig, Choice], LayerGraph]


def adds_layers(choice: Choice) -> bool:
    """Return True if the chosen method changes the model's layers."""
    return any(one.method == choice.name for one in parts(AddedLayers))


def trained_graph(config: ModelConfig, methods: Iterable[Choice]) -> LayerGraph:
    """Return the costed layers of a model with the additions of a job's methods.

    Raises:
        InputError: when the family is unknown, or a method cannot be added to this model.
    """
    graph = layer_graph(config)
    for choice in methods:
        for one in parts(AddedLayers):
            if one.method == choice.name:
                graph = one.add(graph, config, choice)
    return graph
