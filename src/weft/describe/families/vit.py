"""Vision transformers: patches as tokens, blocks with norms before each branch, classes from the class token.

Equal to `transformers.ViTForImageClassification` in parameters (Dosovitskiy et al., arXiv 2010.11929).
"""

from __future__ import annotations

from weft.describe.amount import ZERO, Amount
from weft.describe.families.transformer import (
    LAYER_NORM,
    LOGITS_COPY_BYTES,
    LOSS_BYTES_PER_LOGIT,
    ONE,
    TOKEN_BYTES,
    TOKENS,
    biased_block,
    chain,
    passes,
    per_stream_token,
    per_token,
    repeated,
    transposed_input,
)
from weft.describe.layer import Layer, Matmul, PassWork, Temporaries
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig

# Separate products for queries, keys and values.
_PROJECTIONS = 3

SAMPLES = Amount.of(1.0, batch=1)


def layer_graph(config: ModelConfig) -> LayerGraph:
    """Return the costed layers of a vision transformer with these sizes."""
    return chain(
        config,
        image_embedding(config, bias=True),
        repeated(biased_block(config, projections=_PROJECTIONS), config.layers),
        _head(config),
    )


def image_embedding(config: ModelConfig, *, bias: bool) -> Layer:
    """Build a product per patch, the class token in front, learned positions; tensor ranks do not divide it.

    Backward keeps the pixels and has no input part.
    """
    width = config.hidden
    pixels = config.channels * config.patch_size**2
    product = Matmul(
        count=ONE,
        rows=TOKENS + Amount.of(-1.0, batch=1),
        inner=Amount.of(pixels),
        columns=Amount.of(width),
    )
    parameters = Amount.of(pixels * width + bias * width + (1 + config.sequence) * width)
    # The bias is read and written with the product; the class token is joined on, the positions are added.
    memory = per_token(2.0 * bias * width + 2.0 * width + 3.0 * width)
    return Layer(
        name="embedding",
        kind="embedding",
        parameters=parameters,
        forward=PassWork(matmuls=(product,), memory=memory, kernels=4),
        backward_weight=PassWork(
            matmuls=(transposed_input(product),), memory=memory + 3.0 * parameters, kernels=6
        ),
        kept=Amount.of(config.channels * config.image_size**2, batch=1),
        products=ZERO,
        temporaries=(Temporaries(elements=per_token(width), weights=Amount.of(pixels * width)),),
        sent=per_stream_token(width),
    )


def _head(config: ModelConfig) -> Layer:
    """Build the final norm of all tokens, the class token's product to classes, and cross entropy in fp32."""
    width, classes = config.hidden, config.vocabulary
    product = Matmul(count=ONE, rows=SAMPLES, inner=Amount.of(width), columns=Amount.of(classes))
    parameters = Amount.of(2 * width + width * classes + classes)
    return Layer(
        name="head",
        kind="head",
        parameters=parameters,
        # The norm's input and gathered output; the logits.
        kept=per_stream_token(width) + per_token(width) + Amount.of(classes, batch=1),
        kept_bytes=Amount.of(LOSS_BYTES_PER_LOGIT * classes + TOKEN_BYTES, batch=1),
        freed=Amount.of(classes, batch=1),
        freed_bytes=Amount.of(LOGITS_COPY_BYTES * classes, batch=1),
        products=Amount.of(classes, batch=1),
        freed_products=Amount.of(classes, batch=1),
        temporaries=(
            Temporaries(bytes=Amount.of(LOSS_BYTES_PER_LOGIT * classes, batch=1)),
            # The gradients of the norm's output and input.
            Temporaries(elements=per_token(width) + per_stream_token(width)),
        ),
        **passes(
            (product,),
            (),
            memory=per_stream_token(LAYER_NORM * width) + Amount.of(6.0 * classes, batch=1),
            # The norm, the fp32 copy, the log-softmax and the loss.
            kernels=4,
            parameters=parameters,
        ),
    )
