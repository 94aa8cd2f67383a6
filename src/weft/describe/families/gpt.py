"""GPT-2: layer norms and products with biases, learned positions, one wide feed-forward.

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
    """Return the costed layers of a GPT-2 with these sizes."""
    width = config.hidden
    return chain(
        config,
        embedding(config, learned_positions=True),
        # The results of two query chunks are joined; queries keep their own tokens' keys and values alive.
        repeated(over_context(biased_block(config, causal=True), keys=width, kept=width), config.layers),
        head(config, norm_parameters=2 * width, norm_memory=LAYER_NORM * width, norm_kernels=1),
    )
