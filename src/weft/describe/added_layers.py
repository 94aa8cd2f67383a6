"""The layers that a job trains, and their costs in a plan: the model's layers with what methods change."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from weft.bundles import parts
from weft.describe.families import layer_graph
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig
from weft.describe.plan import Choice, Plan


@dataclass(frozen=True, kw_only=True)
class AddedLayers:
    """The additions of a method to the layers of models; a method contributes it.

    `add` takes the current layers, the model's sizes and the method's options. It keeps the positions of
    layers: the stage of a layer also prices, steps and keeps the layer's additions.
    """

    method: str
    add: Callable[[LayerGraph, ModelConfig, Choice], LayerGraph]


@dataclass(frozen=True, kw_only=True)
class PlannedLayers:
    """Costs of layers that depend on a plan with a method; the method contributes it.

    Attributes:
        decided: returns what the costs depend on in a plan with these options; None if they cost what the
            job's layers cost. It is asked for every plan of a search.
        change: returns the layers with the costs of these decisions.
    """

    method: str
    decided: Callable[[Plan, LayerGraph, Choice], Hashable | None]
    change: Callable[[LayerGraph, Hashable], LayerGraph]


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


def decided_layers(plan: Plan, graph: LayerGraph) -> tuple[tuple[PlannedLayers, Hashable], ...]:
    """Return the methods for which layers cost something else in this plan, each with what it decides."""
    return tuple(
        (one, decided)
        for one in parts(PlannedLayers)
        if (choice := plan.method(one.method)) is not None
        and (decided := one.decided(plan, graph, choice)) is not None
    )
