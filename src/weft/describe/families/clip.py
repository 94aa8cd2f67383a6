"""CLIP: a tower of images and a tower of texts, projected to one space, and a contrastive loss.

Equal to `transformers.CLIPModel` in parameters (Radford et al., arXiv 2103.00020). A sample is an image and a
text. The loss compares all images of a micro-batch with all its texts, so it has terms in pairs of samples. A
matching head gives the log-odds that an image and its text belong together. Its loss is a mean over samples
(as in Zhai et al., arXiv 2303.15343, which also compares other pairs).
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from weft.describe.amount import ZERO, Amount, Term
from weft.describe.families.transformer import (
    LAYER_NORM,
    LOSS_BYTES_PER_LOGIT,
    ONE,
    TOKEN_BYTES,
    biased_block,
    embedding,
    passes,
    per_token,
)
from weft.describe.families.vit import image_embedding
from weft.describe.layer import Layer, Matmul
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ImageText, ModelConfig, image_tokens

# Separate products for queries, keys and values.
_PROJECTIONS = 3
# Mean and inverse deviation of a norm in fp32.
_NORM_BYTES = 8.0
_SAMPLES = Amount.of(1.0, batch=1)
_PAIRS = Amount.of(1.0, batch=2)


def layer_graph(config: ModelConfig) -> LayerGraph:
    """Return the costed layers: the image tower, the text tower, each with its projection, and the head."""
    sizes = sizes_of(config)
    text = text_side(config)
    patches = image_tokens(config.image_size, config.patch_size)
    images = [
        replace(_image_embedding(config), name="image.embedding", kind="image-embedding"),
        *_blocks("image", config, sizes.image_layers, causal=False),
        _projection("image", config.hidden, sizes.projection, normed=_SAMPLES),
    ]
    texts = [
        replace(embedding(text, learned_positions=True), name="text.embedding", kind="text-embedding"),
        *_blocks("text", text, sizes.text_layers, causal=not sizes.matching),
        _projection(
            "text", text.hidden, sizes.projection, normed=_SAMPLES if sizes.matching else per_token(1.0)
        ),
    ]
    layers = (
        *(of_tokens(layer, patches) for layer in images),
        *texts,
        _matching(sizes) if sizes.matching else _head(sizes),
    )
    first, last = len(images), len(layers) - 1
    edges = [(layer, layer + 1) for layer in range(last - 1) if layer != first - 1]
    return LayerGraph(
        name=config.name,
        layers=layers,
        edges=tuple(sorted([*edges, (first - 1, last), (last - 1, last)])),
        sequence=config.sequence,
        vocabulary=int(sizes.matching),
        inputs=((0, 0), (1, first)),
    )


def sizes_of(config: ModelConfig) -> ImageText:
    """Return the sizes of both towers."""
    assert config.image_text is not None, "the model has images and texts"
    return config.image_text


def text_side(config: ModelConfig) -> ModelConfig:
    """Return a transformer with the sizes of the text tower."""
    sizes = sizes_of(config)
    width, heads = sizes.text_hidden, sizes.text_heads
    return replace(config, hidden=width, heads=heads, feed_forward=sizes.text_feed_forward)


def of_tokens(layer: Layer, tokens: int) -> Layer:
    """Return the layer for samples of that many tokens, whatever the model's sequence."""
    found: Layer = _fixed(layer, tokens)
    return found


def _fixed(value: Any, tokens: int) -> Any:
    """Put the number in the place of the sequence in every amount."""
    if isinstance(value, Amount):
        terms = (replace(one, coefficient=one.coefficient * tokens**one.sequence) for one in value.terms)
        return sum((Amount((replace(one, sequence=0),)) for one in terms), ZERO)
    if isinstance(value, tuple):
        return tuple(_fixed(one, tokens) for one in value)
    if is_dataclass(value) and not isinstance(value, type | Term):
        return replace(value, **{one.name: _fixed(getattr(value, one.name), tokens) for one in fields(value)})
    return value


def _image_embedding(config: ModelConfig) -> Layer:
    """Build patches without a bias, a class token, positions, and a norm, which also keeps its input."""
    width, patches = config.hidden, image_tokens(config.image_size, config.patch_size)
    whole = image_embedding(replace(config, sequence=patches), bias=False)
    norm, memory = Amount.of(2 * width), per_token(LAYER_NORM * width)
    forward, backward = whole.forward, whole.backward_weight
    return replace(
        whole,
        parameters=whole.parameters + norm,
        forward=replace(forward, memory=forward.memory + memory, kernels=forward.kernels + 1),
        backward_weight=replace(
            backward, memory=backward.memory + 2.0 * memory + 3.0 * norm, kernels=backward.kernels + 2
        ),
        kept=whole.kept + per_token(width),
        kept_bytes=per_token(_NORM_BYTES),
    )


def _blocks(name: str, config: ModelConfig, count: int, *, causal: bool) -> list[Layer]:
    block = biased_block(config, projections=_PROJECTIONS, causal=causal)
    if sizes_of(config).quick:
        # The logistic function of the activation's input; selective recomputation does not know it.
        more = block.kept + per_token(config.feed_forward)
        block = replace(block, kept=more, products=None, product_bytes=ZERO, freed_products=ZERO)
    return [replace(block, name=f"{name}.block.{index}", kind=f"{name}-block") for index in range(count)]


def _projection(name: str, width: int, columns: int, *, normed: Amount) -> Layer:
    """Build the last norm of `normed` vectors, and the product of one of a sample's with the space."""
    product = Matmul(count=ONE, rows=_SAMPLES, inner=Amount.of(width), columns=Amount.of(columns))
    parameters = Amount.of(2 * width + width * columns)
    return Layer(
        name=f"{name}.projection",
        kind=f"{name}-projection",
        parameters=parameters,
        # The stream; the vector that is multiplied.
        kept=per_token(width) + _SAMPLES * width,
        kept_bytes=normed * _NORM_BYTES,
        sent=_SAMPLES * columns,
        **passes((product,), (), memory=normed * (LAYER_NORM * width), kernels=2, parameters=parameters),
    )


def _head(sizes: ImageText) -> Layer:
    """Build unit vectors, their products in pairs, the temperature, and both directions of cross entropy."""
    size = Amount.of(sizes.projection)
    pairs = Matmul(count=ONE, rows=_SAMPLES, inner=size, columns=_SAMPLES)
    loss = _PAIRS * 2.0
    temperature = Amount.of(1.0)
    work = passes(
        (),
        (pairs,),
        memory=_SAMPLES * (8.0 * sizes.projection) + loss * 6.0,
        kernels=14,
        parameters=temperature,
    )
    return Layer(
        name="head",
        kind="contrastive-head",
        parameters=temperature,
        # Both sides' vectors, before and after they are scaled to unit length; logits of both directions.
        kept=_SAMPLES * (4.0 * sizes.projection) + loss,
        kept_bytes=loss * LOSS_BYTES_PER_LOGIT,
        **work,
    )


def _matching(sizes: ImageText) -> Layer:
    """Build the product of both vectors, a bias, and binary cross entropy."""
    vectors, bias = _SAMPLES * (2.0 * sizes.projection), Amount.of(1.0)
    return Layer(
        name="head",
        kind="matching-head",
        parameters=bias,
        kept=vectors + _SAMPLES,
        kept_bytes=_SAMPLES * (LOSS_BYTES_PER_LOGIT + TOKEN_BYTES),
        **passes((), (), memory=vectors * 1.5 + _SAMPLES * 6.0, kernels=6, parameters=bias),
    )
