"""What the decoder families share: amounts by name, attention products, embedding and head.

b, s and t are micro-batch size, sequence and tensor degree (`Amount`). Sizes of activations are in elements.
Attention is a fused kernel that never stores the s x s scores; its products count the full square, which is
what the kernels of all common libraries without a causal shortcut compute.
"""

from __future__ import annotations

from dataclasses import replace

from weft.describe.amount import ZERO, Amount
from weft.describe.layer_graph import Layer, LayerGraph, Matmul, Pass, chain_edges
from weft.describe.model import ModelConfig

ONE = Amount.of(1)
TOKENS = Amount.of(1, batch=1, sequence=1)
SEQUENCE = Amount.of(1, sequence=1)
SHARD = Amount.of(1, tensor=1)

# Statistics and losses are kept in fp32 whatever the compute precision is.
FP32_BYTES = 4.0
INDEX_BYTES = 8.0


def linear(inner: Amount | float, columns: Amount | float) -> Matmul:
    """Every token through an (inner x columns) matrix."""
    return Matmul(ONE, TOKENS, _amount(inner), _amount(columns))


def attention_products(config: ModelConfig) -> tuple[Matmul, Matmul]:
    """Scores and context of all heads: softmax(Q K^T) V."""
    head = config.hidden / config.heads
    count = Amount.of(config.heads, batch=1, tensor=1)
    return (
        Matmul(count, SEQUENCE, Amount.of(head), SEQUENCE),
        Matmul(count, SEQUENCE, SEQUENCE, Amount.of(head)),
    )


def backward_of(linears: tuple[Matmul, ...], products: tuple[Matmul, ...] = ()) -> tuple[Pass, Pass]:
    """Matmuls of the input and of the weight part of the backward pass, without memory and kernels.

    A product with a weight costs the same again for each part; a product of two activations has no weight,
    so that both its gradients belong to the input part, and a fused kernel computes it a third time.
    """
    input_part = tuple(Matmul(m.count, m.rows, m.columns, m.inner) for m in linears) + products * 2
    weight_part = tuple(Matmul(m.count, m.inner, m.rows, m.columns) for m in linears)
    return Pass(input_part), Pass(weight_part)


def chain(config: ModelConfig, embedding: Layer, block: Layer, head: Layer) -> LayerGraph:
    """`embedding`, the blocks, `head`."""
    blocks = [replace(block, name=f"block.{index}") for index in range(config.layers)]
    layers = (embedding, *blocks, head)
    return LayerGraph(
        name=config.name,
        layers=layers,
        edges=chain_edges(len(layers)),
        sequence=config.sequence,
        vocabulary=config.vocabulary,
    )


def embedding_layer(config: ModelConfig, position_rows: int) -> Layer:
    """Token table, and a table of learned positions where the family has one."""
    width = float(config.hidden)
    states = TOKENS * width
    tables = 2.0 if position_rows else 1.0
    return Layer(
        name="embedding",
        kind="embedding",
        parameters=Amount.of(width * config.vocabulary, tensor=1) + Amount.of(width * position_rows),
        # Read the rows, write them; with positions, read both and write the sum.
        forward=Pass(memory=states * (2.0 * tables), kernels=2 * int(tables)),
        # The gradient of a table is as large as the table, and is filled and added to.
        backward_weight=Pass(
            memory=states * tables + Amount.of(2.0 * width * config.vocabulary, tensor=1), kernels=2
        ),
        kept_bytes=TOKENS * INDEX_BYTES,
        sent=states,
        tensor_reduced=states,
    )


def head_layer(config: ModelConfig, norm_parameters: float) -> Layer:
    """Final norm, the product with the vocabulary, and the cross-entropy loss in fp32."""
    width, classes = float(config.hidden), float(config.vocabulary)
    states = TOKENS * width
    logits = Amount.of(classes, batch=1, sequence=1, tensor=1)
    product = linear(width, Amount.of(classes, tensor=1))
    input_part, weight_part = backward_of((product,))
    own_matrix = ZERO if config.tied_embeddings else Amount.of(width * classes, tensor=1)
    return Layer(
        name="head",
        kind="head",
        parameters=own_matrix + Amount.of(norm_parameters),
        # Norm: read and write. Loss: cast, maximum, exponentials and sum over the logits.
        forward=Pass((product,), memory=states * 2.0 + logits * 4.0, kernels=6),
        backward_input=Pass(input_part.matmuls, memory=states * 3.0 + logits * 4.0, kernels=6),
        backward_weight=Pass(weight_part.matmuls, kernels=1),
        # Norm input and output; logits.
        kept=states * 2.0 + logits,
        # fp32 logits and their log-probabilities; targets.
        kept_bytes=logits * (2.0 * FP32_BYTES) + TOKENS * INDEX_BYTES,
        tensor_reduced=TOKENS * 3.0,
    )


def _amount(value: Amount | float) -> Amount:
    return value if isinstance(value, Amount) else Amount.of(value)
