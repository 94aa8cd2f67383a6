"""BERT with its head for masked tokens: norms after each branch, learned positions, two segment types.

Equal to `transformers.BertForMaskedLM` in parameters (Devlin et al., arXiv 1810.04805).
"""

from __future__ import annotations

from dataclasses import replace

from weft.describe.amount import Amount
from weft.describe.families.transformer import (
    ACTIVATION,
    LAYER_NORM,
    LOGITS_MOVED,
    LOSS_BYTES_PER_LOGIT,
    LOSS_KERNELS,
    TOKEN_BYTES,
    biased_block,
    chain,
    embedding,
    loss_memory,
    over_context,
    passes,
    per_stream_token,
    per_token,
    repeated,
    token_product,
)
from weft.describe.layer import Layer, PassWork
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig

# Separate products for queries, keys and values.
_PROJECTIONS = 3
SEGMENTS = 2


def layer_graph(config: ModelConfig) -> LayerGraph:
    """Return the costed layers of a BERT with these sizes."""
    return chain(
        config,
        _embedding(config),
        repeated(
            # Gathered keys and values replace the rank's own.
            over_context(
                biased_block(config, projections=_PROJECTIONS, norms_last=True),
                keys=config.hidden,
                kept=-2.0 * config.hidden,
            ),
            config.layers,
        ),
        _head(config),
    )


def _embedding(config: ModelConfig) -> Layer:
    """Build the sum of tokens, positions and segments, and a norm; backward also keeps the norm's input."""
    width = config.hidden
    tables = embedding(config, learned_positions=True)
    added = Amount.of(SEGMENTS * width + 2 * width)
    # A segment's row is read, written and added; the norm reads and writes.
    memory = per_stream_token((5.0 + LAYER_NORM) * width)
    forward, backward = tables.forward, tables.backward_weight
    return replace(
        tables,
        parameters=tables.parameters + added,
        forward=PassWork(memory=forward.memory + memory, kernels=forward.kernels + 3),
        backward_weight=PassWork(
            memory=backward.memory + 2.0 * memory + 3.0 * added, kernels=backward.kernels + 5
        ),
        kept=per_stream_token(width),
        # Mean and inverse deviation of the norm in fp32.
        kept_bytes=tables.kept_bytes + per_stream_token(8.0),
        read_bytes=tables.kept_bytes,
    )


def _head(config: ModelConfig) -> Layer:
    """Build dense layer, activation and norm, then product with the vocabulary and cross entropy in fp32.

    All tokens are multiplied with the vocabulary, masked or not, as in `transformers`. The bias of the
    vocabulary is the head's own, also if the matrix is tied. `tensor_reduced` is half of an all-reduce of the
    stream plus the loss's maximum, sum and target logit per token.
    """
    width, vocabulary = config.hidden, config.vocabulary
    dense = replace(token_product(width, width, divided=""), rows=per_stream_token(1.0))
    product = token_product(width, vocabulary, divided="columns")
    matrix = Amount.of(width * vocabulary, tensor=1)
    own = Amount.of(width * width + width + 2 * width) + Amount.of(vocabulary, tensor=1)
    loss = per_token(LOGITS_MOVED * vocabulary, divided=True)
    return Layer(
        name="head",
        kind="head",
        parameters=own if config.tied_embeddings else own + matrix,
        # The input; the activation's and the norm's inputs; the norm's gathered output; the logits.
        kept=per_stream_token(3.0 * width) + per_token(width) + per_token(vocabulary, divided=True),
        kept_bytes=per_token(LOSS_BYTES_PER_LOGIT * vocabulary, divided=True)
        + per_token(TOKEN_BYTES)
        + per_stream_token(8.0),
        products=per_token(width) + per_token(vocabulary, divided=True),
        **loss_memory(per_token(vocabulary, divided=True), matrix, per_token(width)),
        tensor_reduced=per_token(0.5 * width + 3.0),
        **passes(
            (dense, product),
            (),
            memory=per_stream_token((ACTIVATION + LAYER_NORM) * width) + loss,
            # Activation and norm.
            kernels=2 + LOSS_KERNELS,
            parameters=own + matrix,
        ),
    )
