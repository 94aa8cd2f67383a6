"""GPT-2 and its sizes: layer norms and products with biases, learned positions, one wide feed-forward.

Equal to `transformers.GPT2LMHeadModel` in parameters.
"""

from __future__ import annotations

from weft.describe.amount import Amount
from weft.describe.families.transformer import (
    LOG_SUM_EXP_BYTES,
    attention_products,
    chain,
    embedding,
    head,
    passes,
    per_token,
    token_product,
)
from weft.describe.layer_graph import Layer, LayerGraph
from weft.describe.model import ModelConfig

# Elements moved per token: a layer norm reads and writes; a residual reads twice and writes.
_NORM = 2.0
_RESIDUAL = 3.0
_ACTIVATION = 2.0


def layer_graph(config: ModelConfig) -> LayerGraph:
    """The costed layers of a GPT-2 of these sizes."""
    width = config.hidden
    return chain(
        config,
        embedding(config, learned_positions=True),
        (_block(config, index) for index in range(config.layers)),
        head(config, norm_parameters=2 * width, norm_memory=_NORM * width, norm_kernels=1),
    )


def _block(config: ModelConfig, index: int) -> Layer:
    width, inner, heads = config.hidden, config.feed_forward, config.heads
    weights = (
        token_product(width, 3 * width, divided="columns"),
        token_product(width, width, divided="inner"),
        token_product(width, inner, divided="columns"),
        token_product(inner, width, divided="inner"),
    )
    # Two norms, the projections' two biases; then matrices with the biases of divided columns.
    replicated = 4 * width + 2 * width
    divided = 4 * width * width + 3 * width + 2 * width * inner + inner
    parameters = Amount.of(replicated) + Amount.of(divided, tensor=1)
    return Layer(
        name=f"block.{index}",
        kind="block",
        parameters=parameters,
        # Inputs and outputs of both norms; q, k, v and the attention's output; the activation's in and out.
        kept=per_token(4.0 * width) + per_token(4.0 * width + 2.0 * inner, divided=True),
        # Mean and inverse deviation of two norms in fp32.
        kept_bytes=per_token(16.0) + per_token(LOG_SUM_EXP_BYTES * heads, divided=True),
        sent=per_token(width),
        tensor_reduced=per_token(2.0 * width),
        **passes(
            weights,
            attention_products(heads, width // heads),
            memory=per_token((2 * _NORM + 2 * _RESIDUAL) * width)
            + per_token(_ACTIVATION * inner, divided=True),
            # Two norms, two residuals, the activation; the splits of q, k, v are views.
            kernels=5,
            parameters=parameters,
        ),
    )
