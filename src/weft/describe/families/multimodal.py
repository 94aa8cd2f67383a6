"""Multi-modal transformers: a tower of transformer blocks for each modality, and a head that joins them.

Each tower embeds its own tokens, with learned positions. The head concatenates the streams, norms them,
averages over the tokens and multiplies by the classes. The sizes of GraphPipe's multi-modal transformer and
two-branch case study are presets (Jeon et al., ASPLOS 2025, arXiv 2406.17145, appendix A.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.describe.amount import Amount
from weft.describe.families.transformer import (
    LAYER_NORM,
    LOGITS_COPY_BYTES,
    LOSS_BYTES_PER_LOGIT,
    ONE,
    TOKEN_BYTES,
    biased_block,
    embedding,
    passes,
    per_token,
)
from weft.describe.layer import Layer, Matmul, Temporaries
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig, Towers

# Separate products for queries, keys and values.
_PROJECTIONS = 3
# Mean and inverse deviation of a norm in fp32.
_NORM_BYTES = 8.0


def layer_graph(config: ModelConfig) -> LayerGraph:
    """Return the costed layers: tower by tower, each an embedding and its blocks, then the head."""
    towers = towers_of(config)
    layers = [layer for tower in range(len(towers.tokens)) for layer in _tower(config, tower)]
    ends = [last_of(config, tower) for tower in range(len(towers.tokens))]
    head = len(layers)
    inside = [(layer, layer + 1) for layer in range(head) if layer not in ends]
    return LayerGraph(
        name=config.name,
        layers=(*layers, _head(config, len(ends))),
        edges=tuple(sorted([*inside, *((end, head) for end in ends)])),
        sequence=config.sequence,
        vocabulary=config.vocabulary,
        inputs=tuple((tower, end - towers.depth) for tower, end in enumerate(ends)),
    )


def towers_of(config: ModelConfig) -> Towers:
    """Return the sizes of the towers."""
    assert config.towers is not None, "a model of towers has towers"
    return config.towers


def last_of(config: ModelConfig, tower: int) -> int:
    """Return the position of a tower's last layer."""
    return (tower + 1) * (towers_of(config).depth + 1) - 1


def _tower(config: ModelConfig, tower: int) -> Iterator[Layer]:
    tokens, name = towers_of(config).tokens[tower], f"tower.{tower}"
    table = embedding(replace(config, vocabulary=tokens), learned_positions=True)
    yield replace(table, name=f"{name}.embedding", kind=f"embedding.{tokens}")
    block = biased_block(config, projections=_PROJECTIONS)
    yield from (replace(block, name=f"{name}.block.{index}") for index in range(towers_of(config).depth))


def _head(config: ModelConfig, towers: int) -> Layer:
    """Build the concatenation, norm, mean over tokens, product with the classes, and cross entropy."""
    width, classes = towers * config.hidden, config.vocabulary
    product = Matmul(
        count=ONE, rows=Amount.of(1.0, batch=1), inner=Amount.of(width), columns=Amount.of(classes)
    )
    parameters = Amount.of(2 * width + width * classes + classes)
    return Layer(
        name="head",
        kind="head",
        parameters=parameters,
        # The norm's input, the vectors' means, the logits.
        kept=per_token(width) + Amount.of(width + classes, batch=1),
        kept_bytes=per_token(_NORM_BYTES) + Amount.of(LOSS_BYTES_PER_LOGIT * classes + TOKEN_BYTES, batch=1),
        freed=Amount.of(classes, batch=1),
        freed_bytes=Amount.of(LOGITS_COPY_BYTES * classes, batch=1),
        # Without the product, everything can be recomputed from the towers' streams.
        products=Amount.of(classes, batch=1),
        freed_products=Amount.of(classes, batch=1),
        temporaries=(
            Temporaries(bytes=Amount.of(LOSS_BYTES_PER_LOGIT * classes, batch=1)),
            # The gradients of the norm's output and input.
            Temporaries(elements=per_token(2.0 * width)),
        ),
        **passes(
            (product,),
            (),
            # The concatenation, the norm and the mean; the logits' loss.
            memory=per_token((2.0 + LAYER_NORM + 1.0) * width) + Amount.of(6.0 * classes, batch=1),
            kernels=6,
            parameters=parameters,
        ),
    )
