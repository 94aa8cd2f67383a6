"""The layers of a model with low-rank products: all else frozen, with its passes and kept activations.

A frozen linear layer has no gradient of its weight, and keeps no operand for it. The low-rank products of a
layer keep its operand. They are bound by memory: the first one reads the operand. The second one writes a
result as large as the layer's, and a sum reads both. An embedding has no backward pass any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.describe.added_layers import AddedLayers
from weft.describe.amount import ZERO, Amount
from weft.describe.block_products import BlockProduct, block_products, has_experts, products_in
from weft.describe.families.block_parts import NORMS
from weft.describe.families.decoder import kept_for_norm_weights
from weft.describe.families.transformer import (
    ONE,
    TOKENS,
    per_stream_token,
    per_token,
    transposed_input,
    transposed_weight,
)
from weft.describe.layer import LOW_RANK_PRODUCT, Layer, Matmul, PassWork
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig
from weft.describe.plan import Choice
from weft.errors import InputError, Violation
from weft.methods.lora.few_bits import divided_in_blocks, with_few_bits
from weft.methods.lora.options import NAME, LowRank, read_options

_ENCODERS = ("bert", "vit")
# Elements moved for each element of a layer's result: the product writes it, the sum reads two and writes
# one. Backward, the scaled gradient is made and read twice.
_OF_RESULT, _OF_ITS_GRADIENT = 4.0, 4.0
# Of the operand: the product reads it. Backward, its gradient is made, and added to another one.
_OF_OPERAND, _OF_OPERANDS_GRADIENT = 1.0, 4.0
# Of an operand with dropout: a mask of bytes is drawn, and the operand scaled and selected; backward alike.
_OF_DROPPED = 5.0


def add_low_rank(graph: LayerGraph, config: ModelConfig, choice: Choice) -> LayerGraph:
    """Return the layers of the model, frozen, with low-rank products beside linear layers of its blocks.

    Raises:
        InputError: if the linear layers of the family have no known names, or a target is none of them.
    """
    if config.family in _ENCODERS:
        problem = f"{config.name} is of the family {config.family!r}; LoRA adapts decoders"
        raise InputError(Violation("model", problem))
    low_rank, products = read_options(choice), block_products(config)
    chosen = low_rank.chosen(products)
    if low_rank.base is not None:
        graph = divided_in_blocks(graph, products)
    in_few_bits = "" if low_rank.base is None else f", frozen in {low_rank.base}"
    layers = []
    for index, layer in enumerate(graph.layers):
        if index == 0:
            layers.append(_frozen_embedding(layer))
        elif index == len(graph.layers) - 1:
            layers.append(_frozen_head(layer, config))
        else:
            named, own = (products_in(config, index - 1, some) for some in (products, chosen))
            block = _adapted_block(layer, config, own, low_rank, mixture=has_experts(config, index - 1))
            layers.append(block if low_rank.base is None else with_few_bits(block, named, low_rank.base))
    return replace(
        graph,
        name=f"{graph.name} with LoRA of rank {low_rank.rank} and alpha {low_rank.alpha:g}{in_few_bits}",
        layers=_shared(layers),
        tied=tuple(replace(one, parameters=ZERO, frozen=one.parameters) for one in graph.tied),
    )


def _frozen_embedding(layer: Layer) -> Layer:
    return replace(
        _frozen(layer), backward_input=PassWork(), kept=ZERO, kept_bytes=ZERO, products=ZERO, temporaries=()
    )


def _frozen_head(layer: Layer, config: ModelConfig) -> Layer:
    norm = NORMS["layer" if config.family == "gpt" else config.architecture.norm]
    stream = per_stream_token(config.hidden)
    return replace(
        _frozen(layer),
        # The operand of the product with the vocabulary is kept for the gradient of the matrix alone.
        kept=layer.kept + per_token(-config.hidden) + -norm.kept_for_weight * stream,
        kept_bytes=layer.kept_bytes + -norm.bytes_for_weight * stream,
    )


def _frozen(layer: Layer) -> Layer:
    """Return the layer without gradients of its weights."""
    return replace(
        layer,
        parameters=ZERO,
        frozen=layer.parameters,
        backward_weight=PassWork(),
        temporaries=tuple(replace(one, weights=ZERO, rounded=ZERO) for one in layer.temporaries),
    )


def _adapted_block(
    block: Layer, config: ModelConfig, chosen: Sequence[BlockProduct], low_rank: LowRank, *, mixture: bool
) -> Layer:
    elements, more_bytes = (ZERO, ZERO) if config.family == "gpt" else kept_for_norm_weights(config)
    result = replace(
        _frozen(block),
        # With dropout, products keep what they have left of an operand, and not the operand.
        kept=block.kept
        + _operands_left_out(config, () if low_rank.dropout else chosen, mixture=mixture)
        + -1.0 * elements,
        kept_bytes=block.kept_bytes + -1.0 * more_bytes,
    )
    for one in chosen:
        result = _with_low_rank(result, one, low_rank.rank, drops=low_rank.dropout > 0)
    return result


def _operands_left_out(config: ModelConfig, chosen: Sequence[BlockProduct], *, mixture: bool) -> Amount:
    """Return the elements, below 0, of operands that a block keeps no more: no chosen layer reads them.

    The kernel of attention keeps its result in any case, and a mixture is counted as if it kept everything.
    """
    read = {one.reads for one in chosen}
    inputs = {"attention input", *(() if mixture else ("feed-forward input",))}
    decoder = config.architecture
    if config.family != "gpt" and decoder.placement == "shared":
        unread = float(not read & inputs)
    else:
        unread = float(len(inputs - read))
    activation = 0.0 if mixture or "activation" in read else float(config.feed_forward)
    return per_token(-unread * config.hidden) + per_token(-activation, divided=True)


def _with_low_rank(layer: Layer, product: BlockProduct, rank: int, *, drops: bool) -> Layer:
    """Return the layer with the two products beside one linear layer: operand x A, then x B.

    `drops`: A has a dropout of its own before it, which keeps its result and a mask of bytes.
    """
    by_columns, by_rows = (int(product.divided == side) for side in ("columns", "inner"))
    inner, columns = Amount.of(product.inner, tensor=by_rows), Amount.of(product.columns, tensor=by_columns)
    short = Amount.of(rank)
    down, up = (
        Matmul(count=ONE, rows=TOKENS, inner=one, columns=other, kernel=LOW_RANK_PRODUCT)
        for one, other in ((inner, short), (short, columns))
    )
    parameters = inner * short + short * columns
    operand, vector, result = TOKENS * inner, TOKENS * short, TOKENS * columns
    dropped = _OF_DROPPED if drops else 0.0
    return replace(
        layer,
        parameters=layer.parameters + parameters,
        forward=_more(
            layer.forward,
            (down, up),
            (_OF_OPERAND + dropped) * operand + 2.0 * vector + _OF_RESULT * result,
            1 + 3 * drops,
        ),
        backward_input=_more(
            layer.backward_input,
            (transposed_weight(up), transposed_weight(down)),
            _OF_ITS_GRADIENT * result + 2.0 * vector + (_OF_OPERANDS_GRADIENT + dropped) * operand,
            2 + 2 * drops,
        ),
        backward_weight=_more(
            layer.backward_weight,
            (transposed_input(up), transposed_input(down)),
            result + 2.0 * vector + operand + 3.0 * parameters,
            2,
        ),
        kept=layer.kept + vector + (operand if drops else ZERO),
        kept_bytes=layer.kept_bytes + (operand if drops else ZERO),
        products=None if layer.products is None else layer.products + vector + result,
        freed_products=layer.freed_products + result,
    )


def _more(work: PassWork, matmuls: Sequence[Matmul], memory: Amount, kernels: int) -> PassWork:
    """Return the work with more products, elements moved, and kernels beside the products."""
    return PassWork(
        work.matmuls + tuple(matmuls), work.memory + memory, work.kernels + len(matmuls) + kernels
    )


def _shared(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Return the layers with one object for equal fields, as comparisons of layers go by identity."""
    known: dict[Layer, Layer] = {}
    return tuple(replace(known.setdefault(replace(one, name=""), one), name=one.name) for one in layers)


ADDED = AddedLayers(method=NAME, add=add_low_rank)
