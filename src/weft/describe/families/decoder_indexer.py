"""Attention to the tokens that an indexer chooses (DeepSeek-V3.2, arXiv 2512.02556, section 2.1).

It is priced as `transformers` computes it. An indexer scores all pairs of tokens in fp32, without gradients.
Attention then reads a mask with the chosen tokens, and computes all scores. Kernels of other packages
compute the chosen ones alone.
"""

from __future__ import annotations

from dataclasses import replace

from weft.describe.amount import Amount
from weft.describe.decoder import Indexer
from weft.describe.families.transformer import ONE, SEQUENCE, token_product
from weft.describe.layer import FP32_PRODUCT, Layer, Matmul, PassWork, Temporaries
from weft.describe.model import ModelConfig
from weft.describe.windows import CAUSAL, MASKED

_FP32_BYTES = 4.0
# Elements of 16 bits that move per score of a head: its product, scale, rectifier and weighted sum.
_MOVED = 12.0
_KERNELS = 16


def with_indexer(block: Layer, config: ModelConfig, indexer: Indexer, *, own: bool) -> Layer:
    """Return a block that attends to chosen tokens; `own`: its own indexer chooses them."""
    pairs = Amount.of(1.0, batch=1, sequence=2)
    block = replace(
        block,
        # The mask of the attention.
        kept=block.kept + pairs,
        forward=_masked(block.forward),
        backward_input=_masked(block.backward_input),
    )
    if not own:
        return block
    work, parameters = _work(config, indexer)
    scores = pairs * float(indexer.heads)
    return replace(
        block,
        parameters=block.parameters + parameters,
        forward=block.forward.plus(PassWork(work, scores * _MOVED, len(work) + _KERNELS)),
        # The scores of all heads before and after the rectifier, in a forward pass.
        temporaries=(*block.temporaries, Temporaries(bytes=scores * (2.0 * _FP32_BYTES))),
    )


def _work(config: ModelConfig, indexer: Indexer) -> tuple[tuple[Matmul, ...], Amount]:
    """Return an indexer's products of queries, keys, weights of heads and scores; and its parameters."""
    latent = config.architecture.latent
    # Queries are made of attention's latent vector, where it has one.
    width = latent.query_rank if latent is not None and latent.query_rank else config.hidden
    sides = (
        (width, indexer.heads * indexer.size),
        (config.hidden, indexer.size),
        (config.hidden, indexer.heads),
    )
    scores = Matmul(
        count=Amount.of(float(indexer.heads), batch=1),
        rows=SEQUENCE,
        inner=ONE * indexer.size,
        columns=SEQUENCE,
        kernel=FP32_PRODUCT,
    )
    products = tuple(token_product(inner, columns, divided="") for inner, columns in sides)
    # The layer norm of keys has a weight and a bias.
    parameters = sum(inner * columns for inner, columns in sides) + 2 * indexer.size
    return (*products, scores), Amount.of(parameters)


def _masked(work: PassWork) -> PassWork:
    """Return the work with attention under a mask, which computes the whole square."""
    return replace(
        work,
        matmuls=tuple(replace(one, kernel=MASKED) if one.kernel == CAUSAL else one for one in work.matmuls),
    )
