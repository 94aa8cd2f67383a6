"""The costs of expert balance: a sum of counts, and the probabilities of all experts."""

from __future__ import annotations

from dataclasses import replace

from weft.describe.added_layers import AddedLayers
from weft.describe.families.transformer import per_token
from weft.describe.layer import Layer, PassWork
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig
from weft.describe.plan import Choice
from weft.methods.expert_balance.options import NAME
from weft.methods.expert_balance.program import mixtures
from weft.predict.cost.hooks import CostOf, collective_hook
from weft.predict.cost.network import Network

# Bytes per token and expert that the loss keeps: the router's logits and probabilities in fp32.
_KEPT_BYTES = 8.0
# Elements moved per token and expert, and kernels, of each pass.
_MOVED, _KERNELS = 6.0, 8


def add_losses(graph: LayerGraph, config: ModelConfig, choice: Choice) -> LayerGraph:
    """Return the layers with the loss of each mixture; a model without experts stays as it is."""
    layers = list(graph.layers)
    for place in mixtures(graph):
        layers[place] = with_loss(layers[place], graph.experts)
    return replace(graph, layers=tuple(layers))


def with_loss(layer: Layer, experts: int) -> Layer:
    """Return a layer with experts that also computes their balance."""
    return replace(
        layer,
        kept_bytes=layer.kept_bytes + per_token(_KEPT_BYTES * experts),
        forward=_more(layer.forward, experts),
        backward_input=_more(layer.backward_input, experts),
    )


def _more(work: PassWork, experts: int) -> PassWork:
    memory = work.memory + per_token(_MOVED * experts)
    return replace(work, memory=memory, kernels=work.kernels + _KERNELS)


COSTS = (
    *(
        CostOf(kind=kind, hook=collective_hook(lambda pricing: Network.all_reduce))
        for kind in ("expert_counts", "expert_loads")
    ),
    AddedLayers(method=NAME, add=add_losses),
)
