"""The costs of a head whose loss makes logits for a part of the tokens at a time.

The forward pass has two more products per chunk, those of both gradients, and the backward pass lacks them.
A chunked softmax in fp32 copies logits, finds the largest, subtracts it, and takes exponentials. It adds
them up, divides by their sum, and rounds the gradient to the precision of the products. The fused kernel
reads logits twice and writes their gradient (Hsu et al., arXiv 2410.10989, section 3.2). For each chunk the
gradient of the matrix is read and written.

The gradients of the vectors, in place of these, and of the matrix stay until the backward pass. It multiplies
both by the gradient of the loss. Those of a frozen matrix are not made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.describe.amount import Amount
from weft.describe.families.transformer import (
    LOGITS_MOVED,
    LOSS_BYTES_PER_LOGIT,
    LOSS_KERNELS,
    TOKENS,
    transposed_input,
    transposed_weight,
)
from weft.describe.job import Job
from weft.describe.layer import GRADIENT_PRODUCT, Layer, Matmul, PassWork, Temporaries
from weft.describe.layer_choices import LayerOption, Value
from weft.describe.loss_choice import BY_SIZE, CHUNKED, FUSED
from weft.methods.loss_kernels.chunks import chunk_tokens

# Gradients of weights add up over chunks in fp32.
SUMMED_BYTES = 4.0
MATRIX_MOVED = 2.0
NO_VOCABULARY = "is no head that multiplies every token with a vocabulary"


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Elements moved per logit, and launches per chunk beside the products."""

    logits_moved: float
    launches: int


_CHUNKED, _FUSED = _Kernel(12.0, 12), _Kernel(3.0, 1)


def refuse(layer: Layer, value: Value) -> str | None:
    """Return the reason why a layer's loss has no kernel with this value, or None."""
    products = layer.forward.matmuls
    if layer.kind != "head" or not products or products[-1].rows != TOKENS:
        return f"{layer.name} {NO_VOCABULARY}; nearest loss: whole"
    if value != BY_SIZE and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        return f"{value!r} tokens; at least 1, or {BY_SIZE!r}"
    return None


def refuse_fused_job(job: Job) -> str | None:
    """Return the reason why a job's devices cannot run the fused kernel, or None."""
    hosts = sorted({group.device.name for group in job.cluster.groups if group.device.synchronous})
    if not hosts:
        return None
    return f"{', '.join(hosts)} cannot run the fused kernel, which is for GPUs; nearest loss: chunked"


def chunked(layer: Layer, value: Value, sequence: int) -> Layer:
    """Return the head with its loss in chunks of `value` tokens, or by size."""
    product, logits, matrix = _sizes(layer)
    tokens = chunk_tokens(value, _size(product.inner))
    matrix = matrix * float(trains_matrix(layer))
    kept = replace(layer, kept_bytes=layer.kept_bytes + matrix * SUMMED_BYTES)
    vectors = product.rows * product.inner
    temporaries = (
        # In the forward pass, the vectors are there beside their gradients.
        Temporaries(elements=vectors, weights=product.columns * float(tokens), rounded=matrix),
        Temporaries(elements=vectors, bytes=matrix * SUMMED_BYTES),
        Temporaries(bytes=_norm_bytes(layer, logits) + matrix * -SUMMED_BYTES),
    )
    return _without_logits(kept, _CHUNKED, TOKENS * (1.0 / tokens), -(-sequence // tokens), temporaries)


def fused(layer: Layer, value: Value, sequence: int) -> Layer:
    """Return the head with the fused loss; the logits of its chunks are at most twice as many as vectors."""
    product, logits, matrix = _sizes(layer)
    chunks = -(-_size(product.columns) // _size(product.inner))
    hidden, matrix = product.rows * product.inner, matrix * float(trains_matrix(layer))
    kept = replace(layer, kept=layer.kept + matrix)
    temporaries = (
        Temporaries(elements=hidden * 2.0, bytes=matrix * SUMMED_BYTES),
        Temporaries(elements=matrix * -1.0, bytes=_norm_bytes(layer, logits)),
    )
    return _without_logits(kept, _FUSED, Amount.of(chunks), chunks, temporaries)


def _norm_bytes(layer: Layer, logits: Amount) -> Amount:
    """Return the bytes that the backward pass of the norm before the product takes.

    A norm that computes in fp32 keeps its input so, and takes four such tensors. Others take less than the
    loss.
    """
    return (layer.kept_bytes + logits * -LOSS_BYTES_PER_LOGIT) * 4.0


def trains_matrix(layer: Layer) -> bool:
    """Return True if a head's backward pass has the product for the gradient of its matrix."""
    return bool(layer.backward_weight.matmuls)


def _sizes(layer: Layer) -> tuple[Matmul, Amount, Amount]:
    """Return the product with the vocabulary, the logits and the matrix."""
    product = layer.forward.matmuls[-1]
    return product, product.rows * product.columns, product.inner * product.columns


def _size(side: Amount) -> int:
    """Return the length of a product's side on one rank that has all of it."""
    (term,) = side.terms
    return round(term.coefficient)


def _without_logits(
    layer: Layer, kernel: _Kernel, chunks: Amount, launched: int, temporaries: tuple[Temporaries, ...]
) -> Layer:
    """Return the head with the work of a kernel, and without the memory of all logits.

    Args:
        chunks: the chunks of a micro-batch, `launched` as many as a host launches at least.
    """
    product, logits, matrix = _sizes(layer)
    matrix = matrix * float(trains_matrix(layer))
    hidden = product.rows * product.inner
    others = layer.forward.matmuls[:-1]
    gradients = [replace(transposed_weight(product), kernel=GRADIENT_PRODUCT)]
    if trains_matrix(layer):
        gradients.append(replace(transposed_input(product), kernel=GRADIENT_PRODUCT))
    forward = PassWork(
        matmuls=(*layer.forward.matmuls, *gradients),
        memory=layer.forward.memory
        + logits * (kernel.logits_moved - LOGITS_MOVED)
        + chunks * matrix * MATRIX_MOVED,
        kernels=layer.forward.kernels - LOSS_KERNELS - 1 + launched * (1 + len(gradients) + kernel.launches),
    )
    backward_input, backward_weight = layer.backward_input, layer.backward_weight
    return replace(
        layer,
        forward=forward,
        backward_input=PassWork(
            matmuls=backward_input.matmuls[:-1],
            memory=backward_input.memory + logits * (-2.0 * LOGITS_MOVED) + hidden * 2.0,
            kernels=backward_input.kernels - 2 * LOSS_KERNELS,
        ),
        backward_weight=PassWork(
            matmuls=backward_weight.matmuls[:-1],
            memory=backward_weight.memory + matrix * 2.0,
            kernels=backward_weight.kernels,
        ),
        kept=layer.kept + logits * -1.0,
        kept_bytes=layer.kept_bytes + logits * -LOSS_BYTES_PER_LOGIT,
        freed=layer.freed + logits * -1.0,
        freed_bytes=Amount(),
        products=None if layer.products is None else layer.products + logits * -1.0,
        freed_products=Amount(),
        temporaries=temporaries,
        again=replace(forward, matmuls=forward.matmuls[len(others) :], kernels=forward.kernels - len(others)),
    )


OPTIONS = (
    LayerOption(name=CHUNKED, refuse=refuse, changed=chunked),
    LayerOption(name=FUSED, refuse=refuse, changed=fused, refuse_job=refuse_fused_job),
)
