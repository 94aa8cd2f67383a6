"""The layers that a job trains: those of its model, and what methods add to them."""

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
    """What a method adds to the layers of every model that it is asked for; a method contributes it.

    `add` is given the layers so far, the model's sizes and what is asked of the method. Positions of layers
    stay: what is added to a layer belongs to whichever stage holds it, and is priced, stepped and kept there.
    """

    method: str
    add: Callable[[LayerGraph, ModelConfig, Choice], LayerGraph]


def adds_layers(choice: Choice) -> bool:
    """Return whether what is asked of a method makes the trained layers others than the model's."""
    return any(one.method == choice.name for one in parts(AddedLayers))


def trained_graph(config: ModelConfig, methods: Iterable[Choice]) -> LayerGraph:
    """Return the costed layers of a model with all that the methods of a job add to them.

    Raises:
        InputError: when the family is unknown, or a method cannot be added to this model.
    """
    graph = layer_graph(config)
    for choice in methods:
        for one in parts(AddedLayers):
            if one.method == choice.name:
                graph = one.add(graph, config, choice)
    return graph
