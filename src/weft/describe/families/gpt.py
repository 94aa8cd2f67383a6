"""GPT-2 and its sizes: layer norms and products with biases, learned positions, one wide feed-forward.

Equal to `transformers.GPT2LMHeadModel` in parameters.
"""

from __future__ import annotations

from weft.describe.families.transformer import (
    LAYER_NORM,
    biased_block,
    chain,
    embedding,
    head,
    over_context,
    repeated,
)
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig


def layer_graph(config: ModelConfig) -> LayerGraph:
    """Return the costed layers of a GPT-2 of these sizes."""
    width = config.hidden
    return chain(
        config,
        embedding(config, learned_positions=True),
        # What two chunks of queries give is joined; queries keep keys and values of the own tokens alive.
        repeated(over_context(biased_block(config, causal=True), keys=width, kept=width), config.layers),
        head(config, norm_parameters=2 * width, norm_memory=LAYER_NORM * width, norm_kernels=1),
    )
