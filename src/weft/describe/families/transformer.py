"""What all decoder-only transformers share: token products, attention, embedding, head, and their passes.

Elements are of the compute precision. Products are counted in full: scores of the whole square (the
kernel may skip the masked half), and the matrix product of the head for tied embeddings too.
Tensor parallelism is Megatron-LM's (arXiv 1909.08053): heads, feed-forward columns and vocabulary are
divided by t, norms and the stream between blocks are not. What backward needs follows arXiv 2205.05198,
section 4, with attention kernels that never store the s x s scores and without dropout's masks, because
training starts without dropout.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.describe.amount import ZERO, Amount
from weft.describe.layer_graph import Layer, LayerGraph, Matmul, Pass, chain_edges
from weft.describe.model import ModelConfig

TOKENS = Amount.of(1.0, batch=1, sequence=1)
ONE = Amount.of(1.0)
SEQUENCE = Amount.of(1.0, sequence=1)
SHARE = Amount.of(1.0, tensor=1)

# fp32 bytes per token: the logits' fp32 copy and its gradient (or log-softmax).
LOSS_BYTES_PER_LOGIT = 8.0
# fp32 log-sum-exp that a fused attention kernel keeps per token and head.
LOG_SUM_EXP_BYTES = 4.0


def per_token(elements: float, *, divided: bool = False) -> Amount:
    """`elements` for each token of a micro-batch, over the tensor ranks when `divided`."""
    return Amount.of(elements, batch=1, sequence=1, tensor=int(divided))


def token_product(inner: float, columns: float, *, divided: str) -> Matmul:
    """All tokens times a weight of (inner x columns), of which a rank holds a share of `divided`."""
    return Matmul(
        count=ONE,
        rows=TOKENS,
        inner=Amount.of(inner, tensor=int(divided == "inner")),
        columns=Amount.of(columns, tensor=int(divided == "columns")),
    )


def attention_products(heads: int, head_size: int) -> tuple[Matmul, ...]:
    """Scores and context of every head of every sample; keys shared by several heads count for each."""
    count = Amount.of(heads, batch=1, tensor=1)
    size = Amount.of(head_size)
    return (
        Matmul(count=count, rows=SEQUENCE, inner=size, columns=SEQUENCE),
        Matmul(count=count, rows=SEQUENCE, inner=SEQUENCE, columns=size),
    )


def passes(
    weights: Iterable[Matmul],
    attention: Iterable[Matmul],
    *,
    memory: Amount,
    kernels: int,
    first: bool = False,
) -> dict[str, Pass]:
    """The three passes of a layer from its forward products.

    The gradient of a product with respect to the input, and to the weight, costs as much as the product.
    Attention has no weight: the gradients of both of its operands belong to the input part. Element-wise
    backward work moves about twice what forward does (saved value, incoming and outgoing gradient).
    `first` is a layer without an input that has a gradient.
    """
    weights, attention = tuple(weights), tuple(attention)
    products = len(weights) + len(attention)
    return {
        "forward": Pass(matmuls=weights + attention, memory=memory, kernels=kernels + products),
        "backward_input": Pass()
        if first
        else Pass(
            matmuls=tuple(transposed_weight(item) for item in weights) + attention + attention,
            memory=2.0 * memory,
            kernels=2 * kernels + len(weights) + 2 * len(attention),
        ),
        "backward_weight": Pass(
            matmuls=tuple(transposed_input(item) for item in weights),
            memory=2.0 * memory if first else ZERO,
            kernels=2 * kernels if first else len(weights),
        ),
    }


def transposed_weight(product: Matmul) -> Matmul:
    """The product that gives the gradient of the input."""
    return Matmul(count=product.count, rows=product.rows, inner=product.columns, columns=product.inner)


def transposed_input(product: Matmul) -> Matmul:
    """The product that gives the gradient of the weight."""
    return Matmul(count=product.count, rows=product.inner, inner=product.rows, columns=product.columns)


def embedding(config: ModelConfig, *, learned_positions: bool) -> Layer:
    """Token table, divided by vocabulary over the tensor ranks, and learned positions where there are any.

    Backward keeps the token numbers (int64) and adds gradients into the table; it has no input part.
    """
    width = config.hidden
    positions = float(config.sequence * width) if learned_positions else 0.0
    # A lookup reads a row and writes it; positions are read once more and added.
    lookups = 5.0 if learned_positions else 2.0
    return Layer(
        name="embedding",
        kind="embedding",
        parameters=Amount.of(config.vocabulary * width, tensor=1) + Amount.of(positions),
        kept_bytes=per_token(8.0),
        sent=per_token(width),
        tensor_reduced=per_token(width),
        **passes(
            (), (), memory=per_token(lookups * width), kernels=3 if learned_positions else 1, first=True
        ),
    )


def head(config: ModelConfig, *, norm_parameters: int, norm_memory: float, norm_kernels: int) -> Layer:
    """Final norm, product with the vocabulary, and cross entropy computed in fp32 over divided logits.

    Tied embeddings: the matrix is counted in the embedding, the product here.
    `tensor_reduced` is the loss's: maximum, sum and the target's logit per token.
    """
    width, vocabulary = config.hidden, config.vocabulary
    product = token_product(width, vocabulary, divided="columns")
    # Logits are read and written once by each of: the fp32 copy, the log-softmax and the loss.
    loss = per_token(6.0 * vocabulary, divided=True)
    matrix = ZERO if config.tied_embeddings else Amount.of(width * vocabulary, tensor=1)
    return Layer(
        name="head",
        kind="head",
        parameters=Amount.of(norm_parameters) + matrix,
        kept=per_token(2.0 * width) + per_token(vocabulary, divided=True),
        kept_bytes=per_token(LOSS_BYTES_PER_LOGIT * vocabulary, divided=True) + per_token(8.0),
        tensor_reduced=per_token(3.0),
        **passes((product,), (), memory=per_token(norm_memory) + loss, kernels=norm_kernels + 3),
    )


def chain(config: ModelConfig, first: Layer, blocks: Iterable[Layer], last: Layer) -> LayerGraph:
    """The graph of a decoder: embedding, blocks, head, one after the other."""
    layers = (first, *blocks, last)
    return LayerGraph(
        name=config.name,
        layers=layers,
        edges=chain_edges(len(layers)),
        sequence=config.sequence,
        vocabulary=config.vocabulary,
    )
