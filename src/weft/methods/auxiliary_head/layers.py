"""The auxiliary head as a part of the block before it: its work, kept activations and parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.describe.added_layers import AddedLayers
from weft.describe.amount import ZERO
from weft.describe.layer import Layer, PassWork
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig
from weft.describe.plan import Choice
from weft.errors import InputError, Violation
from weft.methods.auxiliary_head.options import NAME, read_options

# Families with a head of one norm and one product with the vocabulary, at every token of the stream.
FAMILIES = ("gpt", "llama")
_SUFFIX = "+auxiliary_head"


def add_head(graph: LayerGraph, config: ModelConfig, choice: Choice) -> LayerGraph:
    """Return the layers of the model, with an auxiliary head added to one block.

    Raises:
        InputError: if the model has no such block, or its family has another kind of head.
    """
    options = read_options(choice)
    if config.family not in FAMILIES:
        known = " and ".join(FAMILIES)
        problem = f"{config.name} is of the family {config.family!r}; heads are known for {known} models"
        raise InputError(Violation(NAME, problem))
    if options.after_block > config.layers:
        problem = f"{options.after_block}; {config.name} has {config.layers} blocks"
        raise InputError(Violation(f"{NAME}.after_block", problem, str(config.layers)))
    head = _untied_head(graph, config)
    layers = list(graph.layers)
    layers[options.after_block] = _together(layers[options.after_block], head)
    return replace(graph, layers=tuple(layers))


def head_places(graph: LayerGraph) -> tuple[int, ...]:
    """Return the positions of the layers with an auxiliary head."""
    return tuple(place for place, layer in enumerate(graph.layers) if layer.name.endswith(_SUFFIX))


def stage_with(layer: int, stages: Sequence[Sequence[int]]) -> int:
    """Return the index of the stage that holds a layer; `stages` has the layers of each stage."""
    return next(index for index, layers in enumerate(stages) if layer in layers)


def _untied_head(graph: LayerGraph, config: ModelConfig) -> Layer:
    """Return the model's own head, with an untied matrix."""
    head = graph.layers[-1]
    tied = [one.parameters for one in graph.tied if one.layers[-1] == len(graph.layers) - 1]
    return replace(head, parameters=sum(tied, head.parameters))


def _together(block: Layer, head: Layer) -> Layer:
    """Return one layer with the work of both; it sends the block's output.

    The head's norm keeps its input. A next block in the same stage keeps it, too: it counts twice.
    """
    known = block.products is not None and head.products is not None
    return replace(
        block,
        name=f"{block.name}{_SUFFIX}",
        parameters=block.parameters + head.parameters,
        forward=_work(block.forward, head.forward),
        backward_input=_work(block.backward_input, head.backward_input),
        backward_weight=_work(block.backward_weight, head.backward_weight),
        kept=block.kept + head.kept,
        kept_bytes=block.kept_bytes + head.kept_bytes,
        products=(block.products or ZERO) + (head.products or ZERO) if known else None,
        product_bytes=block.product_bytes + head.product_bytes,
        freed=block.freed + head.freed,
        freed_bytes=block.freed_bytes + head.freed_bytes,
        freed_products=block.freed_products + head.freed_products,
        # The head's backward pass comes first.
        temporaries=block.temporaries + head.temporaries,
    )


def _work(one: PassWork, other: PassWork) -> PassWork:
    return PassWork(
        matmuls=one.matmuls + other.matmuls,
        memory=one.memory + other.memory,
        kernels=one.kernels + other.kernels,
    )


ADDED = AddedLayers(method=NAME, add=add_head)
