"""Transformers whose decoder attends to the output of an encoder, of which every decoder block reads a copy.

Here, the original ones have layer norms before each branch, biases and learned positions (Vaswani et al.,
arXiv 1706.03762). T5 has RMS norms, no biases and relative positions (Raffel et al., arXiv 1910.10683). A
table of buckets in the first block of each side is added to scores, which the forward pass stores. T5 equals
`transformers.T5ForConditionalGeneration` in parameters. Both sides have the same number of tokens.
"""

from __future__ import annotations

from dataclasses import replace

from weft.describe.amount import Amount
from weft.describe.families.block_parts import NORMS, BlockPart, product_with_bias
from weft.describe.families.transformer import (
    ACTIVATION,
    LOG_SUM_EXP_BYTES,
    RESIDUAL,
    attention_products,
    embedding,
    head,
    last_product_temporaries,
    passes,
    per_stream_token,
    per_token,
)
from weft.describe.layer import PLAIN_PRODUCT, Layer
from weft.describe.layer_graph import LayerGraph, TiedParameters
from weft.describe.model import EncoderDecoder, ModelConfig

# Elements moved per stored score: the sum with the positions, and the softmax.
_SCORES = 5.0


def layer_graph(config: ModelConfig) -> LayerGraph:
    """Return the costed layers: the encoder's, its last norm, the decoder's, the head."""
    sizes = sizes_of(config)
    table = embedding(config, learned_positions=not sizes.position_buckets)
    encoder = [_block(config, causal=False, reads_memory=False)] * sizes.encoder_layers
    decoder = [_block(config, causal=True, reads_memory=True)] * sizes.decoder_layers
    memory, begins = sizes.encoder_layers + 1, sizes.encoder_layers + 2
    layers = (
        replace(table, name="encoder.embedding"),
        *_side("encoder", encoder, config),
        _memory(config),
        # A table that serves both sides counts in the first.
        replace(table, name="decoder.embedding", parameters=Amount(), kind="embedding.tied")
        if config.tied_embeddings
        else replace(table, name="decoder.embedding"),
        *_side("decoder", decoder, config),
        _head(config),
    )
    last = len(layers) - 1
    edges = [(layer, layer + 1) for layer in range(last) if layer != memory]
    matrix = Amount.of(config.hidden * config.vocabulary, tensor=1)
    edges += [(memory, layer) for layer in range(begins + 1, last)]
    return LayerGraph(
        name=config.name,
        layers=layers,
        edges=tuple(sorted(edges)),
        sequence=config.sequence,
        vocabulary=config.vocabulary,
        tied=(TiedParameters((0, begins, last), matrix),) if config.tied_embeddings else (),
        inputs=((0, 0), (1, begins)),
    )


def sizes_of(config: ModelConfig) -> EncoderDecoder:
    """Return the sizes of both sides."""
    assert config.encoder_decoder is not None, "the model has an encoder and a decoder"
    return config.encoder_decoder


def _side(name: str, blocks: list[Layer], config: ModelConfig) -> list[Layer]:
    """Name the blocks of a side; the first one has the table of relative positions."""
    buckets = sizes_of(config).position_buckets * config.heads
    named = [replace(one, name=f"{name}.block.{index}") for index, one in enumerate(blocks)]
    if buckets:
        more = named[0].parameters + Amount.of(buckets)
        named[0] = replace(named[0], kind=f"{named[0].kind}.first", parameters=more)
    return named


def _memory(config: ModelConfig) -> Layer:
    """Build the encoder's last norm; its output counts here, though the decoder's products keep it."""
    width = config.hidden
    part = NORMS[sizes_of(config).norm].of_stream(width)
    return Layer(
        name="encoder.norm",
        kind="norm",
        parameters=part.parameters,
        kept=part.kept + per_token(width),
        kept_bytes=part.kept_bytes,
        sent=per_stream_token(width),
        **passes((), (), memory=part.memory, kernels=part.kernels, parameters=part.parameters),
    )


def _head(config: ModelConfig) -> Layer:
    norm, width = NORMS[sizes_of(config).norm], config.hidden
    made = head(
        config,
        norm_parameters=norm.parameters * width,
        norm_memory=norm.memory * width,
        norm_kernels=norm.kernels,
        norm_kept_bytes=norm.kept_bytes * width + norm.bytes_per_vector,
    )
    # Loss kernels know the heads of chains.
    return replace(made, kind="decoder-head")


def _block(config: ModelConfig, *, causal: bool, reads_memory: bool) -> Layer:
    """Build norms, attention to the own side and perhaps to the encoder, and a feed-forward."""
    norm = NORMS[sizes_of(config).norm].of_stream(config.hidden)
    part = norm + _attention(config, causal=causal)
    if reads_memory:
        part = part + norm + _attention(config, causal=False)
    part = part + norm + _feed_forward(config)
    return Layer(
        name="block",
        kind="decoder-block" if reads_memory else "encoder-block",
        parameters=part.parameters,
        kept=part.kept,
        kept_bytes=part.kept_bytes,
        temporaries=last_product_temporaries(config.hidden, config.feed_forward),
        sent=per_stream_token(config.hidden),
        **passes(
            part.weights,
            part.attention,
            memory=part.memory,
            kernels=part.kernels,
            parameters=part.parameters,
        ),
    )


def _attention(config: ModelConfig, *, causal: bool) -> BlockPart:
    """Return products, scores and residual; queries read the stream, keys and values it or the memory."""
    sizes, width = sizes_of(config), config.hidden
    inner = config.heads * sizes.head_size
    made = [
        product_with_bias(width, inner, divided="", bias=sizes.biases),
        product_with_bias(width, 2 * inner, divided="", bias=sizes.biases),
        product_with_bias(inner, width, divided="", bias=sizes.biases),
    ]
    parameters = made[0][1] + made[1][1] + made[2][1]
    scores = attention_products(config.heads, sizes.head_size, causal=causal)
    stored = Amount.of(config.heads, batch=1, sequence=2)
    fused = not sizes.position_buckets
    return BlockPart(
        weights=tuple(product for product, _ in made),
        attention=scores if fused else tuple(replace(one, kernel=PLAIN_PRODUCT) for one in scores),
        parameters=parameters,
        # The norm's output; queries, keys, values and the attention's output; stored scores.
        kept=per_token(width + 4.0 * inner) + (Amount() if fused else stored),
        kept_bytes=per_token(LOG_SUM_EXP_BYTES * config.heads) if fused else Amount(),
        memory=per_token(RESIDUAL * width) + (Amount() if fused else stored * _SCORES),
        # The residual; keys and values are two products.
        kernels=2 if fused else 4,
    )


def _feed_forward(config: ModelConfig) -> BlockPart:
    """Return the products, activation and residual; a gate is another product, and multiplies it."""
    sizes, width, inner = sizes_of(config), config.hidden, config.feed_forward
    into = 2 if sizes.gated else 1
    first, parameters = product_with_bias(width, into * inner, divided="", bias=sizes.biases)
    last, more = product_with_bias(inner, width, divided="", bias=sizes.biases)
    # The activation's output, and its input unless it is a rectifier; a gate, and the product with it.
    kept = (1 if sizes.rectified else 2) + (2 if sizes.gated else 0)
    return BlockPart(
        weights=(first, last),
        parameters=parameters + more,
        kept=per_token(width + float(kept * inner)),
        memory=per_token(RESIDUAL * width + into * ACTIVATION * inner),
        kernels=1 + into,
    )
