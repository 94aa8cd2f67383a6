"""Attention of a decoder as a part of its block: grouped heads, or DeepSeek's latent vectors."""

from __future__ import annotations

from dataclasses import replace

from weft.describe.amount import ZERO, Amount
from weft.describe.decoder import Decoder, Latent
from weft.describe.families.block_parts import NORMS, BlockPart, product_with_bias
from weft.describe.families.transformer import LOG_SUM_EXP_BYTES, SEQUENCE, per_token
from weft.describe.layer import Matmul
from weft.describe.model import ModelConfig
from weft.describe.windows import CAUSAL

# Elements moved per element: rotary positions read a vector, turn its halves and add. A cap of scores scales
# them, takes tanh and scales again.
_ROTARY = 5.0


def attention_part(config: ModelConfig, decoder: Decoder) -> BlockPart:
    """Return the products, the positions and the norms between the input of attention and its result."""
    if decoder.latent is not None:
        values = config.heads * decoder.latent.value_size
        return _latent(config, decoder.latent, bias=decoder.query_bias) + _gate(config, decoder, values)
    queries, keys = config.heads * decoder.head_size, config.key_value_heads * decoder.head_size
    made = queries + keys * (1 if decoder.keys_as_values else 2)
    projected, parameters = product_with_bias(config.hidden, made, divided="columns", bias=decoder.query_bias)
    output, more = product_with_bias(queries, config.hidden, divided="inner", bias=decoder.output_bias)
    rotated = queries + keys if decoder.position_rows is None else 0
    # Beside the rotated queries and keys, a joint result keeps those before the rotation.
    joint = rotated if decoder.joint_projection else 0
    found = BlockPart(
        weights=(projected, output),
        attention=scores_and_context(config.heads, decoder.head_size, decoder.head_size),
        parameters=parameters + more + Amount.of(config.heads * decoder.sinks, tensor=1),
        # Queries, keys, values and the attention's output.
        kept=per_token(2.0 * queries + 2.0 * keys + joint, divided=True),
        kept_bytes=per_token(LOG_SUM_EXP_BYTES * config.heads, divided=True),
        products=per_token(2.0 * queries + 2.0 * keys, divided=True),
        product_bytes=per_token(LOG_SUM_EXP_BYTES * config.heads, divided=True),
        # Queries and keys before their rotation.
        freed_products=per_token(rotated - joint, divided=True),
        memory=per_token(_ROTARY * rotated, divided=True),
        # Three per rotated tensor. Two more, because three products here count as one.
        kernels=(6 if rotated else 0) + 2,
    )
    return found + _query_key_norms(config, decoder, queries, keys) + _gate(config, decoder, queries)


def key_elements(config: ModelConfig, decoder: Decoder) -> float:
    """Return half of the elements of a token's keys and values."""
    latent = decoder.latent
    if latent is None:
        return config.key_value_heads * decoder.head_size
    return 0.5 * config.heads * (latent.plain_size + latent.rotary_size + latent.value_size)


def scores_and_context(heads: int, head_size: int, value_size: int) -> tuple[Matmul, Matmul]:
    """Return the products of causal attention; keys shared by several heads count for each head."""
    count = Amount.of(heads, batch=1, tensor=1)
    return (
        Matmul(count=count, rows=SEQUENCE, inner=Amount.of(head_size), columns=SEQUENCE, kernel=CAUSAL),
        Matmul(count=count, rows=SEQUENCE, inner=SEQUENCE, columns=Amount.of(value_size), kernel=CAUSAL),
    )


def _query_key_norms(config: ModelConfig, decoder: Decoder, queries: int, keys: int) -> BlockPart:
    cost, vectors = NORMS[decoder.norm], config.heads + config.key_value_heads
    if decoder.value_norm:
        values = NORMS["rms-without-weight"].inside(keys, config.key_value_heads, ZERO, divided=True)
        return values + _query_key_norms(config, replace(decoder, value_norm=False), queries, keys)
    if decoder.query_key_norm == "none":
        return BlockPart()
    if decoder.query_key_norm == "together":
        return cost.inside(queries + keys, 2, Amount.of(queries + keys), divided=True)
    own = decoder.query_key_norm == "own-heads"
    # Without keys of its own, a block has the norm of queries alone.
    norms = 2 if keys else 1
    weights = Amount.of(queries + keys, tensor=1) if own else Amount.of(norms * decoder.head_size)
    return cost.inside(queries + keys, vectors, weights, divided=True)


def _gate(config: ModelConfig, decoder: Decoder, results: int) -> BlockPart:
    """Return the gate on attention's results: its product, and a sigmoid of it that multiplies them."""
    if decoder.attention_gate == "none":
        return BlockPart()
    gates = config.heads if decoder.attention_gate == "heads" else results
    bias = decoder.query_bias and decoder.attention_gate == "with-queries"
    product, parameters = product_with_bias(config.hidden, gates, divided="columns", bias=bias)
    return BlockPart(
        weights=(product,),
        parameters=parameters,
        # The sigmoid, and its product with the results; the results count in attention.
        kept=per_token(gates + results, divided=True),
        products=per_token(gates, divided=True),
        memory=per_token(2.0 * gates + 3.0 * results, divided=True),
        kernels=2,
    )


def _latent(config: ModelConfig, latent: Latent, *, bias: bool) -> BlockPart:
    """Return attention with latent vectors; keys have a rotary part that all heads share.

    `bias`: the products that read the stream or write to it have biases; that of undivided queries has none.
    """
    heads, width, norm = config.heads, config.hidden, NORMS["rms"]
    query_size = latent.plain_size + latent.rotary_size
    queries, values = heads * query_size, heads * latent.value_size
    unpacked = heads * (latent.plain_size + latent.value_size)
    weights: list[Matmul] = []
    parameters = ZERO
    found = BlockPart()
    shared = latent.key_value_rank + latent.rotary_size
    steps = [(width, shared, ""), (latent.key_value_rank, unpacked, "columns"), (values, width, "inner")]
    if latent.query_rank:
        steps[1:1] = [(latent.query_rank, queries, "columns")]
        steps.insert(0, (width, latent.query_rank, ""))
    else:
        steps.insert(1, (width, queries, "columns"))
    for inner, columns, divided in steps:
        product, more = product_with_bias(inner, columns, divided=divided, bias=bias and divided != "columns")
        weights.append(product)
        parameters += more
    for rank in filter(None, (latent.query_rank, latent.key_value_rank)):
        # The scaled latent vector is the input of the next product.
        found += norm.inside(rank, 1, Amount.of(rank), divided=False)
        found += BlockPart(kept=per_token(rank))
    rotated = (heads + 1) * latent.rotary_size
    attended = 2.0 * queries + 2.0 * values
    return found + BlockPart(
        weights=tuple(weights),
        attention=scores_and_context(heads, query_size, latent.value_size),
        parameters=parameters,
        kept=per_token(attended, divided=True),
        kept_bytes=per_token(LOG_SUM_EXP_BYTES * heads, divided=True),
        products=per_token(latent.query_rank + shared) + per_token(queries + unpacked + values, divided=True),
        product_bytes=per_token(LOG_SUM_EXP_BYTES * heads, divided=True),
        freed_products=per_token(latent.rotary_size) + per_token(queries + unpacked - values, divided=True),
        # Rotation; then queries and keys are joined from two parts.
        memory=per_token(_ROTARY * rotated + 4.0 * queries, divided=True),
        kernels=6 + 2 + 2,
    )
