"""The costs of expert balance: a sum of counts, and the probabilities of all experts."""

from __future__ import annotations

from dataclasses import replace

from weft.describe.added_layers import AddedLayers
from weft.describe.families.transformer import per_token
from weft.describe.layer import Layer, PassWork
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig
from weft.describe.plan import Choice
from weft.errors import InputError, Violation
from weft.methods.expert_balance.options import NAME, TABLE_NAME, read_options
from weft.methods.expert_balance.program import mixtures
from weft.predict.cost.hooks import CostOf, collective_hook
from weft.predict.cost.network import Network

# Bytes per token and expert that a loss keeps, in fp32: the scores, and logits for the squares.
_SCORE_BYTES, _LOGIT_BYTES = 4.0, 4.0
# Elements moved per token and expert, and kernels, of each pass.
_MOVED, _KERNELS = 6.0, 8
# Those of counting tokens of each expert up to a capacity, in the forward pass.
_COUNTED, _COUNTING_KERNELS = 4.0, 6


def add_losses(graph: LayerGraph, config: ModelConfig, choice: Choice) -> LayerGraph:
    """Return the layers with the loss of each mixture.

    Raises:
        InputError: if the model has no experts, or its routers have no bias that could follow the loads.
    """
    table, decoder = read_options(choice), config.decoder
    experts = None if decoder is None else decoder.experts
    if experts is None:
        problem = f"{config.name} has no experts"
        raise InputError(Violation(f"{TABLE_NAME}.balance", problem, f"leave out [{TABLE_NAME}]"))
    if table.bias_rate and not experts.choice_bias:
        problem = f"{table.bias_rate:g}; routers of {config.family} have no bias for the choice of experts"
        raise InputError(Violation(f"{TABLE_NAME}.bias_rate", problem, "0"))
    layers, squares = list(graph.layers), table.z_weight > 0
    for place in mixtures(graph):
        layers[place] = with_loss(layers[place], graph.experts, squares=squares)
        if table.capacity is not None:
            forward = _more(layers[place].forward, graph.experts, _COUNTED, _COUNTING_KERNELS)
            layers[place] = replace(layers[place], forward=forward)
    return replace(graph, layers=tuple(layers))


def with_loss(layer: Layer, experts: int, *, squares: bool) -> Layer:
    """Return a layer with experts that also computes their balance, and the squares of its z-loss."""
    kept_bytes = _SCORE_BYTES + (_LOGIT_BYTES if squares else 0.0)
    return replace(
        layer,
        kept_bytes=layer.kept_bytes + per_token(kept_bytes * experts),
        forward=_more(layer.forward, experts),
        backward_input=_more(layer.backward_input, experts),
    )


def _more(work: PassWork, experts: int, moved: float = _MOVED, kernels: int = _KERNELS) -> PassWork:
    """Return the work with elements moved per token and expert, and kernels."""
    return replace(work, memory=work.memory + per_token(moved * experts), kernels=work.kernels + kernels)


COSTS = (
    *(
        CostOf(kind=kind, hook=collective_hook(lambda pricing: Network.all_reduce))
        for kind in ("expert_counts", "expert_loads")
    ),
    AddedLayers(method=NAME, add=add_losses),
)
