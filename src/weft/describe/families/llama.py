"""Llama: RMS norms, rotary positions, grouped keys and values, a gated feed-forward, no biases.

Equal to `transformers.LlamaForCausalLM` in parameters.
"""

from __future__ import annotations

from weft.describe.amount import Amount
from weft.describe.families.transformer import (
    LOG_SUM_EXP_BYTES,
    attention_products,
    chain,
    embedding,
    head,
    last_product_temporaries,
    over_context,
    passes,
    per_stream_token,
    per_token,
    repeated,
    token_product,
)
from weft.describe.layer import Layer, Temporaries
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig

# Elements moved per token. An RMS norm reads, squares and scales; rotary positions read a vector, turn its
# halves and add; the gated activation reads and writes the gate, then reads both factors and writes.
_NORM = 4.0
_RESIDUAL = 3.0
_ROTARY = 5.0
_GATED_ACTIVATION = 5.0
# Bytes per element of an RMS norm's kept input: it computes in fp32 for every input precision.
_NORM_INPUT_BYTES = 4.0
# Bytes of its inverse root mean square per token.
_ROOT_BYTES = 4.0


def layer_graph(config: ModelConfig) -> LayerGraph:
    """Return the costed layers of a Llama with these sizes."""
    width = config.hidden
    return chain(
        config,
        embedding(config, learned_positions=False),
        repeated(_block(config), config.layers),
        head(
            config,
            norm_parameters=width,
            norm_memory=_NORM * width,
            norm_kernels=4,
            norm_kept_bytes=_NORM_INPUT_BYTES * width + _ROOT_BYTES,
        ),
    )


def _block(config: ModelConfig) -> Layer:
    width, inner, heads = config.hidden, config.feed_forward, config.heads
    key_width = width // heads * config.key_value_heads
    weights = (
        token_product(width, width + 2 * key_width, divided="columns"),
        token_product(width, width, divided="inner"),
        token_product(width, 2 * inner, divided="columns"),
        token_product(inner, width, divided="inner"),
    )
    divided = 2 * width * (width + key_width) + 3 * width * inner
    parameters = Amount.of(2 * width) + Amount.of(divided, tensor=1)
    block = Layer(
        name="block",
        kind="block",
        parameters=parameters,
        # The normalised inputs and the scaled, gathered outputs of both norms; q, k, v and the attention's
        # output; gate, up, silu(gate) and their product.
        kept=per_stream_token(2.0 * width)
        + per_token(2.0 * width)
        + per_token(2.0 * width + 2.0 * key_width + 4.0 * inner, divided=True),
        kept_bytes=per_stream_token(2.0 * (_NORM_INPUT_BYTES * width + _ROOT_BYTES))
        + per_token(LOG_SUM_EXP_BYTES * heads, divided=True),
        # The attention's product; q, k, v, the attention, gate and up.
        products=per_token(width) + per_token(2.0 * width + 2.0 * key_width + 2.0 * inner, divided=True),
        product_bytes=per_token(LOG_SUM_EXP_BYTES * heads, divided=True),
        # The attention's product, of which the next norm keeps the sum; q and k before their rotation.
        freed_products=per_token(width) + per_token(width + key_width, divided=True),
        # The last product of the feed-forward, and the activation before it.
        temporaries=(
            *last_product_temporaries(width, inner),
            Temporaries(elements=per_stream_token(width) + per_token(2.0 * inner, divided=True)),
        ),
        sent=per_stream_token(width),
        tensor_reduced=per_token(2.0 * width),
        **passes(
            weights,
            attention_products(heads, width // heads, causal=True),
            memory=per_stream_token((2 * _NORM + 2 * _RESIDUAL) * width)
            + per_token(_ROTARY * (width + key_width) + _GATED_ACTIVATION * inner, divided=True),
            # Four per norm, three per rotated tensor, two residuals, activation and gate; three more
            # because q, k, v, gate and up are five products here counted as two.
            kernels=8 + 6 + 2 + 2 + 3,
            parameters=parameters,
        ),
    )
    # The results of two chunks of queries are joined; gathered keys and values replace the rank's own.
    return over_context(block, keys=key_width, kept=width - 2.0 * key_width)
