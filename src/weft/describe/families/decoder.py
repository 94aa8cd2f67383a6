"""Decoders of text: one description for all rows of `decoders.toml`, and for Llama.

Equal to the models of `transformers` in parameters. Weft's runtime computes dense rows as priced here.
Mixtures are estimates: the work of the experts that compute each token, and the parameters of all experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from weft.describe.amount import ZERO, Amount
from weft.describe.decoder import BlockSizes, Decoder, LinearAttention, Placement
from weft.describe.families.block_parts import NORMS, BlockPart
from weft.describe.families.decoder_attention import attention_part, key_elements
from weft.describe.families.decoder_block_inputs import (
    block_input_part,
    handed_on,
    with_block_inputs,
)
from weft.describe.families.decoder_feed_forward import feed_forward_part, mixture_temporaries
from weft.describe.families.decoder_indexer import with_indexer
from weft.describe.families.decoder_linear_attention import linear_part, with_state
from weft.describe.families.transformer import (
    RESIDUAL,
    chain,
    embedding,
    head,
    last_product_temporaries,
    over_context,
    passes,
    per_stream_token,
    per_token,
)
from weft.describe.kernels import with_attention
from weft.describe.layer import Layer, PassWork, Temporaries
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig
from weft.describe.windows import windowed

# Norms of a block by their placement.
_NORMS_OF_BLOCK = {"before": 2, "after": 2, "around": 4, "parallel": 2, "shared": 1}
# Elements moved per element: tanh, and the scales before and after it.
_CAP = 6.0


def layer_graph(config: ModelConfig) -> LayerGraph:
    """Return the costed layers of a decoder with these sizes."""
    decoder = config.architecture
    graph = chain(config, _embedding(config, decoder), _blocks(config, decoder), _head(config, decoder))
    experts = 0 if decoder.experts is None else decoder.experts.count
    return replace(graph, divided=_divided_sizes(config, decoder), experts=experts)


class _Kind(NamedTuple):
    """Everything in which a block of a decoder may differ from the others."""

    experts: bool
    window: int
    linear: LinearAttention | None
    sizes: BlockSizes | None
    # True with an indexer, False with the choice of the block before, None for attention to all tokens.
    chooses: bool | None

    def placement(self, decoder: Decoder) -> Placement:
        own = None if self.linear is None else self.linear.placement
        return own or decoder.placement


def _kind(decoder: Decoder, index: int) -> _Kind:
    chooses = None if decoder.indexer is None else index in decoder.indexer.blocks
    return _Kind(
        decoder.has_experts(index),
        decoder.window(index),
        decoder.linear_in(index),
        decoder.sizes_in(index),
        chooses,
    )


def _blocks(config: ModelConfig, decoder: Decoder) -> Iterator[Layer]:
    known: dict[_Kind, Layer] = {}
    for index in range(config.layers):
        kind = _kind(decoder, index)
        if kind not in known:
            known[kind] = _block(config, decoder, kind)
        block = known[kind]
        yield replace(block, name=f"block.{index}", sent=block.sent + handed_on(config, decoder, index + 1))


def _block(config: ModelConfig, decoder: Decoder, kind: _Kind) -> Layer:
    if kind.sizes is not None:
        config = _with_sizes(config, decoder, kind.sizes)
        decoder = config.architecture
    width, experts, placement = config.hidden, kind.experts, kind.placement(decoder)
    parts = _stream_part(config, decoder, placement)
    parts += attention_part(config, decoder) if kind.linear is None else linear_part(config, kind.linear)
    parts += feed_forward_part(config, decoder, experts=experts)
    if decoder.experts is not None and experts and decoder.experts.beside:
        parts += _beside_experts(config, decoder)
    if decoder.block_inputs is not None:
        parts += block_input_part(config, decoder, decoder.block_inputs)
    mixture = decoder.experts if experts else None
    inner = config.feed_forward if mixture is None else mixture.active * mixture.width
    block = Layer(
        name="block",
        kind="block",
        parameters=parts.parameters,
        kept=parts.kept,
        kept_bytes=parts.kept_bytes,
        products=parts.products,
        product_bytes=parts.product_bytes,
        freed_products=parts.freed_products,
        temporaries=(
            *last_product_temporaries(width, inner, norms_last=_read_products(placement) > 1.0),
            # The activation before the last product of the feed-forward.
            *((_gate_temporaries(width, inner),) if decoder.gated else ()),
        )
        if mixture is None
        else mixture_temporaries(width, mixture),
        sent=per_stream_token(width),
        tensor_reduced=per_token(2.0 * width),
        dispatched=ZERO if mixture is None else per_token(mixture.active * width),
        routed=parts.routed,
        routed_share=parts.routed_share,
        routed_kept=parts.routed_kept,
        **passes(
            parts.weights,
            parts.attention,
            memory=parts.memory,
            kernels=parts.kernels,
            parameters=parts.parameters,
        ),
    )
    if kind.linear is not None:
        return with_state(block, config, kind.linear)
    if decoder.indexer is not None:
        return with_indexer(block, config, decoder.indexer, own=kind.chooses is True)
    if decoder.attention_cap:
        # No fused kernel bounds scores; keys and values are repeated for all heads.
        repeated = 2 * (config.heads - config.key_value_heads) * decoder.head_size
        block = replace(block, kept=block.kept + per_token(repeated, divided=True))
        return with_attention(block, config, "math")
    if kind.window:
        return windowed(block, kind.window, config.sequence)
    if decoder.sinks or decoder.windows or decoder.linear is not None:
        # Context ranks divide the tokens of all blocks or of none.
        return block
    # The results of two chunks of queries are joined; gathered keys and values replace the rank's own.
    keys = key_elements(config, decoder)
    joined = config.heads * (decoder.latent.value_size if decoder.latent else decoder.head_size)
    return over_context(block, keys=keys, kept=joined - 2.0 * keys)


def _with_sizes(config: ModelConfig, decoder: Decoder, own: BlockSizes) -> ModelConfig:
    """Return the model with the sizes of one block."""
    changed = replace(decoder, head_size=own.head_size, keys_as_values=own.keys_as_values)
    return replace(
        config,
        heads=own.heads,
        key_value_heads=own.key_value_heads,
        feed_forward=own.feed_forward,
        decoder=changed,
    )


def _beside_experts(config: ModelConfig, decoder: Decoder) -> BlockPart:
    """Return the plain feed-forward beside experts, the norms of both, and the router's scale."""
    parts = feed_forward_part(config, decoder, experts=False)
    for _ in range(3):
        parts += NORMS[decoder.norm].of_stream(config.hidden)
    return parts + BlockPart(parameters=Amount.of(config.hidden))


def _gate_temporaries(width: int, inner: int) -> Temporaries:
    return Temporaries(elements=per_stream_token(width) + per_token(2.0 * inner, divided=True))


def _stream_part(config: ModelConfig, decoder: Decoder, placement: Placement) -> BlockPart:
    """Return the norms and the residuals of a block, with the inputs that its branches keep."""
    width, cost = config.hidden, NORMS[decoder.norm]
    found = BlockPart(
        # The gathered input of each branch; branches with one norm keep it once.
        kept=per_token((1.0 if placement == "shared" else 2.0) * width),
        # The attention's product, of which the next norm keeps the sum; norms after branches read both.
        products=per_token(_read_products(placement) * width),
        freed_products=per_token(_read_products(placement) * width),
        memory=per_stream_token(2 * RESIDUAL * width),
        kernels=2,
    )
    for _ in range(_NORMS_OF_BLOCK[placement]):
        found += cost.of_stream(width)
    return found


def _read_products(placement: Placement) -> float:
    """Return the results of branches, of two, that a block's later kernels read."""
    return {"before": 1.0, "after": 2.0, "around": 2.0}.get(placement, 0.0)


def kept_for_norm_weights(config: ModelConfig) -> tuple[Amount, Amount]:
    """Return the elements and bytes that a block keeps for the gradients of its norms' weights alone."""
    decoder, cost = config.architecture, NORMS[config.architecture.norm]
    stream = per_stream_token(_NORMS_OF_BLOCK[decoder.placement] * config.hidden)
    heads = config.heads + config.key_value_heads
    inside = per_token(heads * decoder.head_size * (decoder.query_key_norm != "none"), divided=True)
    return cost.kept_for_weight * (stream + inside), cost.bytes_for_weight * (stream + inside)


def _embedding(config: ModelConfig, decoder: Decoder) -> Layer:
    width, rows = config.hidden, decoder.position_rows
    layer = embedding(config, learned_positions=rows is not None)
    if rows:
        layer = replace(layer, parameters=layer.parameters + Amount.of(rows * width))
    if decoder.block_inputs is not None:
        layer = with_block_inputs(layer, config, decoder, decoder.block_inputs)
        layer = replace(layer, sent=layer.sent + handed_on(config, decoder, 0))
    if not decoder.scaled_embedding:
        return layer
    scaled = per_stream_token(2.0 * width)
    return replace(
        layer,
        forward=layer.forward.plus(PassWork(memory=scaled, kernels=1)),
        backward_weight=layer.backward_weight.plus(PassWork(memory=scaled, kernels=1)),
    )


def _head(config: ModelConfig, decoder: Decoder) -> Layer:
    width, cost = config.hidden, NORMS[decoder.norm]
    layer = head(
        config,
        norm_parameters=cost.parameters * width,
        norm_memory=cost.memory * width,
        norm_kernels=cost.kernels,
        norm_kept_bytes=cost.kept_bytes * width + cost.bytes_per_vector,
    )
    if not cost.kept:
        layer = replace(layer, kept=layer.kept + per_stream_token(-width))
    if decoder.head_bias:
        layer = replace(layer, parameters=layer.parameters + Amount.of(config.vocabulary, tensor=1))
    return _capped(layer, config) if decoder.logits_cap else layer


def _capped(layer: Layer, config: ModelConfig) -> Layer:
    """Return the head with bounded logits; the backward pass reads the result of tanh."""
    logits = per_token(config.vocabulary, divided=True)

    def more(work: PassWork) -> PassWork:
        return replace(work, memory=work.memory + _CAP * logits, kernels=work.kernels + 3)

    return replace(
        layer,
        kept=layer.kept + logits,
        forward=more(layer.forward),
        backward_input=more(layer.backward_input),
    )


def _divided_sizes(config: ModelConfig, decoder: Decoder) -> tuple[tuple[str, int], ...]:
    """Return the names and sizes that the number of tensor ranks must divide without a remainder.

    None: a norm over the queries of all heads reads those of all ranks.
    """
    alike = decoder.linear is None and not decoder.block_sizes
    if decoder.undivided or not alike or decoder.query_key_norm == "together":
        return ()
    experts, keys = decoder.experts, config.key_value_heads
    dense = experts is None or bool(experts.dense)
    return (
        ("heads", config.heads),
        *((("key-value heads", keys),) if keys != config.heads else ()),
        *((("feed-forward columns", config.feed_forward),) if dense else ()),
        *((("columns of an expert", experts.width),) if experts is not None else ()),
    )
