"""Common parts of transformers: token products, attention, embedding, head, and their passes.

Elements have the compute precision. Scores count for the whole square, although the kernel may skip the
masked half. The matrix product of the head also counts for tied embeddings. Tensor parallelism is
Megatron-LM's (arXiv 1909.08053): t divides heads, feed-forward columns and vocabulary. If t divides s, it
also divides the tokens of norms and of the stream between divided products (arXiv 2205.05198).
Kept tensors follow the latter's section 4. Attention kernels never store the s x s scores. There are no
dropout masks, because training starts without dropout. The gathered inputs of divided products are kept.
Context ranks gather keys and values (Llama 3, arXiv 2407.21783, section 3.3.2) and keep them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypedDict

from weft.describe.amount import ZERO, Amount
from weft.describe.layer import Layer, Matmul, PassWork, Temporaries
from weft.describe.layer_graph import LayerGraph, TiedParameters, chain_edges
from weft.describe.model import ModelConfig

TOKENS = Amount.of(1.0, batch=1, sequence=1)
ONE = Amount.of(1.0)
SEQUENCE = Amount.of(1.0, sequence=1)

# fp32 bytes per token: cross entropy makes a copy of the logits and their log-softmax, and keeps the latter.
# Its backward pass has the gradients of both; tensor ranks compute that of the copy only.
LOSS_BYTES_PER_LOGIT = 8.0
LOGITS_COPY_BYTES = 4.0
# The fp32 copy, the log-softmax and the loss each read and write the logits once.
LOGITS_MOVED = 6.0
LOSS_KERNELS = 3
# fp32 log-sum-exp that a fused attention kernel keeps per token and head.
LOG_SUM_EXP_BYTES = 4.0
# Token numbers are int64.
TOKEN_BYTES = 8.0
# Elements moved per token: a layer norm reads and writes; a residual reads twice and writes.
LAYER_NORM = 2.0
RESIDUAL = 3.0
ACTIVATION = 2.0


def per_token(elements: float, *, divided: bool = False) -> Amount:
    """Return `elements` for each token of a micro-batch; tensor ranks divide them when `divided`."""
    return Amount.of(elements, batch=1, sequence=1, tensor=int(divided))


def per_stream_token(elements: float) -> Amount:
    """Return `elements` for each of a rank's tokens of the stream between divided products."""
    return Amount.of(elements, batch=1, sequence=1, stream=1)


def token_product(inner: float, columns: float, *, divided: str) -> Matmul:
    """Return the product of all tokens and a weight (inner x columns); tensor ranks divide side `divided`."""
    return Matmul(
        count=ONE,
        rows=TOKENS,
        inner=Amount.of(inner, tensor=int(divided == "inner")),
        columns=Amount.of(columns, tensor=int(divided == "columns")),
    )


def attention_products(heads: int, head_size: int, *, causal: bool) -> tuple[Matmul, ...]:
    """Return the scores' and context's products; keys shared by several heads count for each head."""
    count = Amount.of(heads, batch=1, tensor=1)
    size = Amount.of(head_size)
    kernel = "flash2-causal" if causal else "flash2"
    return (
        Matmul(count=count, rows=SEQUENCE, inner=size, columns=SEQUENCE, kernel=kernel),
        Matmul(count=count, rows=SEQUENCE, inner=SEQUENCE, columns=size, kernel=kernel),
    )


class Passes(TypedDict):
    """The passes of a layer, as keyword arguments of `Layer`."""

    forward: PassWork
    backward_input: PassWork
    backward_weight: PassWork


def passes(
    weights: Iterable[Matmul],
    attention: Iterable[Matmul],
    *,
    memory: Amount,
    kernels: int,
    parameters: Amount,
) -> Passes:
    """Build the three passes of a layer from its forward products and element-wise work.

    The gradient of a product with respect to the input, and to the weight, costs as much as the product.
    Attention has no weight: the gradients of both operands belong to the input part. Element-wise backward
    work moves about twice the elements of forward (saved value, incoming and outgoing gradient). Every
    micro-batch adds its gradient to the accumulated gradient: two reads and a write per parameter.
    """
    weights, attention = tuple(weights), tuple(attention)
    return {
        "forward": PassWork(
            matmuls=weights + attention, memory=memory, kernels=kernels + len(weights) + len(attention)
        ),
        "backward_input": PassWork(
            matmuls=tuple(transposed_weight(product) for product in weights) + attention + attention,
            memory=2.0 * memory,
            kernels=2 * kernels + len(weights) + 2 * len(attention),
        ),
        "backward_weight": PassWork(
            matmuls=tuple(transposed_input(product) for product in weights),
            memory=3.0 * parameters,
            kernels=2 * len(weights),
        ),
    }


def transposed_weight(product: Matmul) -> Matmul:
    """Return the product that computes the gradient of the input."""
    return Matmul(count=product.count, rows=product.rows, inner=product.columns, columns=product.inner)


def transposed_input(product: Matmul) -> Matmul:
    """Return the product that computes the gradient of the weight."""
    return Matmul(count=product.count, rows=product.inner, inner=product.rows, columns=product.columns)


def embedding(config: ModelConfig, *, learned_positions: bool) -> Layer:
    """Build the token table, divided by vocabulary over the tensor ranks, and learned positions if any.

    Backward keeps the token numbers (int64) and has no input part. It fills a gradient as large as the
    tables, scatters into it and adds it to the accumulated gradient.
    """
    width = config.hidden
    positions = config.sequence * width if learned_positions else 0
    tables = Amount.of(config.vocabulary * width, tensor=1) + Amount.of(positions)
    # A lookup reads a row and writes it; positions are looked up too, and added.
    lookups = per_token(2.0 * width) + per_stream_token(5.0 * width if learned_positions else 0.0)
    return Layer(
        name="embedding",
        kind="embedding",
        parameters=tables,
        forward=PassWork(memory=lookups, kernels=3 if learned_positions else 1),
        backward_weight=PassWork(memory=lookups + 4.0 * tables, kernels=6 if learned_positions else 3),
        kept_bytes=per_token(TOKEN_BYTES),
        products=ZERO,
        temporaries=(Temporaries(elements=per_stream_token(width), weights=tables),),
        sent=per_stream_token(width),
        # Half of an all-reduce forward and half of one backward, or all of one forward.
        tensor_reduced=per_token(0.5 * width),
    )


def last_product_temporaries(
    width: float, inner: float, *, norms_last: bool = False
) -> tuple[Temporaries, ...]:
    """Return the moments of the backward pass of a feed-forward's last product.

    Tensor ranks first gather the gradient of the product's output, and copy it into the order of the tokens.
    That needs nothing of the forward pass, unless a norm follows the product. The norm has freed its input.
    """
    stream, inside = per_stream_token(width), per_token(inner, divided=True)
    gathered, copies = per_token(width), per_token(2.0 * width)
    matrix = Amount.of(width * inner, tensor=1)
    if not norms_last:
        return (
            Temporaries(elements=stream + inside, weights=matrix, divided=False),
            Temporaries(elements=stream + gathered + inside, weights=matrix, divided=True),
            Temporaries(elements=stream + copies, divided=True, first=True),
        )
    return (
        Temporaries(elements=inside, weights=matrix, divided=False),
        Temporaries(elements=gathered + inside, weights=matrix, divided=True),
        Temporaries(elements=copies, divided=True),
        # A layer that runs again has its own part of its input. It copies and scatters the product beside the
        # sum that the residual reads.
        Temporaries(elements=stream + gathered + inside, weights=matrix, divided=True, again=True),
        Temporaries(elements=stream * 3.0 + copies, divided=True, again=True),
    )


def biased_block(
    config: ModelConfig,
    *,
    causal: bool = False,
    projections: int = 1,
    norms_last: bool = False,
) -> Layer:
    """Build a block of layer norms, attention and one wide feed-forward, all products with biases.

    Norms before or after their branch cost and keep the same. `projections`: kernels that compute queries,
    keys and values; the splits of a joint projection are views. `causal`: tokens attend to earlier tokens.
    `norms_last`: each norm follows its branch.
    """
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
    residual_products = per_token((2.0 if norms_last else 1.0) * width)
    return Layer(
        name="block",
        kind="block",
        parameters=parameters,
        # Inputs and gathered outputs of both norms; q, k, v and the attention's output; the activation's in
        # and out.
        kept=per_stream_token(2.0 * width)
        + per_token(2.0 * width)
        + per_token(4.0 * width + 2.0 * inner, divided=True),
        # Mean and inverse deviation of two norms in fp32.
        kept_bytes=per_stream_token(16.0) + per_token(LOG_SUM_EXP_BYTES * heads, divided=True),
        # The attention's product; q, k, v, the attention and the first product of the feed-forward. A
        # product followed only by a residual is not needed; a norm after it needs it.
        products=residual_products + per_token(4.0 * width + inner, divided=True),
        product_bytes=per_token(LOG_SUM_EXP_BYTES * heads, divided=True),
        # The norm after a residual keeps the sum.
        freed_products=residual_products,
        temporaries=last_product_temporaries(width, inner, norms_last=norms_last),
        sent=per_stream_token(width),
        tensor_reduced=per_token(2.0 * width),
        **passes(
            weights,
            attention_products(heads, width // heads, causal=causal),
            memory=per_stream_token((2 * LAYER_NORM + 2 * RESIDUAL) * width)
            + per_token(ACTIVATION * inner, divided=True),
            # Two norms, two residuals, the activation; one projection is counted as a product.
            kernels=5 + projections - 1,
            parameters=parameters,
        ),
    )


def over_context(block: Layer, *, keys: float, kept: float) -> Layer:
    """Return the block with its gathered and kept elements when context ranks divide the tokens.

    Args:
        keys: elements of a token's keys, equal to those of its values; both are gathered.
        kept: additional kept elements per own token; fewer elements are kept when it is negative.
    """
    gathered, more = (per_token(elements, divided=True) for elements in (2.0 * keys, kept))
    return replace(block, gathered=gathered, context_kept=more)


class LossMemory(TypedDict):
    """The memory of a head's loss, as keyword arguments of `Layer`."""

    freed: Amount
    freed_bytes: Amount
    freed_products: Amount
    temporaries: tuple[Temporaries, ...]


def loss_memory(logits: Amount, matrix: Amount, vectors: Amount) -> LossMemory:
    """Return the logits that cross entropy frees, and the worst moments of a head's backward pass.

    Its product makes the gradients of the `matrix` and of the `vectors`.
    """
    return {
        "freed": logits,
        "freed_bytes": logits * LOGITS_COPY_BYTES,
        "freed_products": logits,
        "temporaries": (
            Temporaries(bytes=logits * LOSS_BYTES_PER_LOGIT, divided=False),
            Temporaries(bytes=logits * LOGITS_COPY_BYTES, divided=True),
            Temporaries(
                elements=logits + vectors,
                bytes=logits * (LOGITS_COPY_BYTES - LOSS_BYTES_PER_LOGIT),
                weights=matrix,
            ),
        ),
    }


def head(
    config: ModelConfig,
    *,
    norm_parameters: int,
    norm_memory: float,
    norm_kernels: int,
    norm_kept_bytes: float = 0.0,
) -> Layer:
    """Build the final norm, the product with the vocabulary, and cross entropy in fp32 over divided logits.

    Tied embeddings: the matrix is counted in the embedding, the product here. `tensor_reduced` is half of an
    all-reduce of the stream plus the loss's maximum, sum and target logit per token. `norm_kept_bytes`: bytes
    per token that the norm keeps in addition to one value per element.
    """
    width, vocabulary = config.hidden, config.vocabulary
    product = token_product(width, vocabulary, divided="columns")
    loss = per_token(LOGITS_MOVED * vocabulary, divided=True)
    matrix = Amount.of(width * vocabulary, tensor=1)
    norm = Amount.of(norm_parameters)
    return Layer(
        name="head",
        kind="head",
        parameters=norm if config.tied_embeddings else norm + matrix,
        # The norm's input and gathered output; the logits.
        kept=per_stream_token(width) + per_token(width) + per_token(vocabulary, divided=True),
        kept_bytes=per_token(LOSS_BYTES_PER_LOGIT * vocabulary, divided=True)
        + per_token(TOKEN_BYTES)
        + per_stream_token(norm_kept_bytes),
        products=per_token(vocabulary, divided=True),
        **loss_memory(per_token(vocabulary, divided=True), matrix, per_token(width)),
        tensor_reduced=per_token(0.5 * width + 3.0),
        **passes(
            (product,),
            (),
            memory=per_stream_token(norm_memory) + loss,
            kernels=norm_kernels + LOSS_KERNELS,
            parameters=norm + matrix,
        ),
    )


def chain(config: ModelConfig, first: Layer, blocks: Iterable[Layer], last: Layer) -> LayerGraph:
    """Build the graph of a transformer: a chain of embedding, blocks and head."""
    layers = (first, *blocks, last)
    matrix = Amount.of(config.hidden * config.vocabulary, tensor=1)
    return LayerGraph(
        name=config.name,
        layers=layers,
        edges=chain_edges(len(layers)),
        sequence=config.sequence,
        vocabulary=config.vocabulary,
        tied=(TiedParameters((0, len(layers) - 1), matrix),) if config.tied_embeddings else (),
        divided=divided_sizes(config),
    )


def repeated(block: Layer, count: int) -> Iterator[Layer]:
    """Yield `count` copies of the block, with names ``block.0`` and so on."""
    return (replace(block, name=f"block.{index}") for index in range(count))


def divided_sizes(config: ModelConfig) -> tuple[tuple[str, int], ...]:
    """Return the names and sizes that the number of tensor ranks must divide without a remainder."""
    keys = config.key_value_heads
    return (
        ("heads", config.heads),
        *((("key-value heads", keys),) if keys != config.heads else ()),
        ("feed-forward columns", config.feed_forward),
    )
