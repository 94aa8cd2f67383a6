"""Vectors that blocks read beside the stream: inputs of each token and block, and keys of blocks before.

Inputs are rows of a table, added to a product of the token's embedding (Gemma 3n and Gemma 4). A block gates
and projects its own, and adds the result to the stream. A stage hands on the vectors that later blocks read.
"""

from __future__ import annotations

from dataclasses import replace

from weft.describe.amount import Amount
from weft.describe.decoder import BlockInputs, Decoder
from weft.describe.families.block_parts import NORMS, BlockPart, product_with_bias
from weft.describe.families.transformer import ACTIVATION, RESIDUAL, passes, per_stream_token, per_token
from weft.describe.layer import Layer
from weft.describe.model import ModelConfig


def block_input_part(config: ModelConfig, decoder: Decoder, inputs: BlockInputs) -> BlockPart:
    """Return the third branch of a block: a gate of its input, a product, and a norm of the result."""
    width, size = config.hidden, inputs.size
    gate, parameters = product_with_bias(width, size, divided="", bias=False)
    last, more = product_with_bias(size, width, divided="", bias=False)
    return NORMS[decoder.norm].of_stream(width) + BlockPart(
        weights=(gate, last),
        parameters=parameters + more,
        # The stream, the gate before and after its activation, the input, and their product.
        kept=per_token(width + 4.0 * size),
        products=per_token(width + size),
        memory=per_token((ACTIVATION + 3.0) * size) + per_stream_token(RESIDUAL * width),
        kernels=3,
    )


def with_block_inputs(layer: Layer, config: ModelConfig, decoder: Decoder, inputs: BlockInputs) -> Layer:
    """Return the first layer with the table, the product and the norm of all blocks' inputs."""
    made = config.layers * inputs.size
    product, parameters = product_with_bias(config.hidden, made, divided="", bias=False)
    cost = NORMS[decoder.norm]
    norm = cost.inside(made, config.layers, Amount.of(cost.parameters * inputs.size), divided=False)
    added = passes(
        (product,),
        (),
        memory=per_token(7.0 * made) + norm.memory,
        kernels=6 + norm.kernels,
        parameters=parameters + norm.parameters,
    )
    return replace(
        layer,
        parameters=layer.parameters + parameters + norm.parameters + Amount.of(inputs.rows * made),
        kept=layer.kept + per_token(config.hidden) + norm.kept,
        kept_bytes=layer.kept_bytes + norm.kept_bytes,
        forward=layer.forward.plus(added["forward"]),
        backward_weight=layer.backward_weight.plus(added["backward_weight"]).plus(added["backward_input"]),
    )


def handed_on(config: ModelConfig, decoder: Decoder, layer: int) -> Amount:
    """Return the elements beside the stream that later blocks read of the layers up to this one."""
    inputs = decoder.block_inputs
    elements = 0.0 if inputs is None else float((config.layers - layer) * inputs.size)
    sizes = decoder.block_sizes
    readers = [block for block, one in enumerate(sizes) if not one.key_value_heads]
    if readers and layer < config.layers:
        # Of each kind, the last block with keys of its own.
        owners = {decoder.window(block): block for block in range(readers[0])}
        elements += sum(
            2.0 * sizes[block].key_value_heads * sizes[block].head_size
            for block in owners.values()
            if block < layer
        )
    return per_stream_token(elements)
