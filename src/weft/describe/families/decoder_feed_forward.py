"""The feed-forward of a decoder as a part of its block: plain, gated, or a mixture of gated experts."""

from __future__ import annotations

from dataclasses import replace

from weft.describe.amount import Amount
from weft.describe.decoder import Decoder, Experts
from weft.describe.families.block_parts import BlockPart, product_with_bias
from weft.describe.families.transformer import (
    ACTIVATION,
    TOKENS,
    per_stream_token,
    per_token,
    token_product,
)
from weft.describe.layer import Temporaries
from weft.describe.model import ModelConfig

# Elements moved per column: the gated activation reads and writes the gate, then reads both factors and
# writes.
_GATED_ACTIVATION = 5.0
# Bytes per token and expert: the router's probabilities in fp32 and their input.
_ROUTER_BYTES = 8.0


def feed_forward_part(config: ModelConfig, decoder: Decoder, *, experts: bool) -> BlockPart:
    """Return the products and activations between the input of the feed-forward and its result."""
    if experts and decoder.experts is not None:
        return _mixture(config.hidden, decoder.experts, bias=decoder.feed_forward_bias)
    inner, width, gated = config.feed_forward, config.hidden, decoder.gated
    bias = decoder.feed_forward_bias
    first, parameters = product_with_bias(width, 2 * inner if gated else inner, divided="columns", bias=bias)
    last, more = product_with_bias(inner, width, divided="inner", bias=bias)
    return BlockPart(
        weights=(first, last),
        parameters=parameters + more + Amount.of(decoder.activation_parameters),
        # Gate, up, the activated gate and their product; or the activation's in and out.
        kept=per_token((4.0 if gated else 2.0) * inner, divided=True),
        products=per_token((2.0 if gated else 1.0) * inner, divided=True),
        memory=per_token((_GATED_ACTIVATION if gated else ACTIVATION) * inner, divided=True),
        # Activation and gate, and one more because two products count as one.
        kernels=3 if gated else 1,
    )


def _mixture(width: int, experts: Experts, *, bias: bool) -> BlockPart:
    """Return a mixture; tensor ranks divide the columns of every expert, and have the whole router.

    `bias`: the products of the shared experts have biases.
    """
    shared = experts.shared_width / experts.width
    columns = (experts.active + shared) * experts.width
    # Each token's product with several experts counts as that of several tokens.
    rows = (experts.active + shared) * TOKENS
    gate = replace(token_product(width, 2 * experts.width, divided="columns"), rows=rows)
    last = replace(token_product(experts.width, width, divided="inner"), rows=rows)
    own, shared_matrices = 3 * width * experts.count * experts.width, 3 * width * experts.shared_width
    router = width * experts.count + experts.router_parameters * experts.count + width * experts.shared_gate
    own_biases = 2 * experts.biases * experts.count * experts.width
    shared_biases = 2 * bias * experts.shared_width
    whole_biases = width * (experts.biases * experts.count + (bias and experts.shared_width > 0))
    return BlockPart(
        weights=(token_product(width, experts.count, divided=""), gate, last),
        parameters=Amount.of(own + own_biases, tensor=1, expert=1)
        + Amount.of(shared_matrices + shared_biases, tensor=1)
        + Amount.of(router + whole_biases),
        # The gathered tokens of each expert, and its weighted results; shared results and their gate.
        kept=per_token(2.0 * experts.active * width + experts.shared_gate * (width + 1.0))
        + per_token(4.0 * columns, divided=True),
        kept_bytes=per_token(_ROUTER_BYTES * experts.count),
        products=per_token(experts.count + experts.active * width) + per_token(2.0 * columns, divided=True),
        # Gathering and weighing read and write; the results of the active experts are added up.
        memory=per_token((6.0 * experts.active) * width)
        + per_token(_GATED_ACTIVATION * columns, divided=True),
        kernels=12,
        routed=(gate, last),
        routed_share=experts.active / (experts.active + shared),
        routed_kept=per_token(2.0 * experts.active * width)
        + per_token(4.0 * experts.active * experts.width, divided=True),
    )


def mixture_temporaries(width: int, experts: Experts) -> tuple[Temporaries, ...]:
    """Return the moments of the backward pass of a mixture.

    First the weights of the results get gradients, in fp32. Then follow the products of the experts, the last
    first. Each has a gradient of the matrices of all experts.
    """
    routed, stream = per_token(experts.active * width), per_stream_token(width)
    inside = per_token(experts.active * experts.width, divided=True)
    matrix = Amount.of(width * experts.count * experts.width, tensor=1, expert=1)
    return (
        Temporaries(elements=stream + routed * 3.0, rounded=routed * 5.0, divided=False),
        Temporaries(elements=stream + per_token(width) + routed * 3.0, rounded=routed * 5.0, divided=True),
        Temporaries(elements=stream + inside, weights=matrix),
        # The results of experts are gone, then their activations, too.
        Temporaries(elements=stream + inside * 2.0 + routed * -1.0),
        Temporaries(elements=stream + inside * -2.0, weights=matrix * 2.0),
    )
