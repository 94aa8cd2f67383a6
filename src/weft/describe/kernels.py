"""`Kernels`: another program's kernels for a model, and the tensors that its tensor ranks divide.

The graphs of `weft.describe.families` describe weft's own runtime. `with_kernels` describes a program with
other kernels: the same mathematics with other time and memory. Sources: Korthikanti et al., arXiv 2205.05198
(sequence parallelism, selective recomputation, fused scores); Hagemann et al., arXiv 2311.05610 (effect of
the norm's kernel on memory fit); Dao, arXiv 2307.08691 (attention that never stores its scores);
NVIDIA's Megatron-LM and Transformer Engine (`gradient_accumulation_fusion`, `fuse_wgrad_accumulation`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Literal

from weft.describe.amount import ZERO, Amount
from weft.describe.layer import PLAIN_PRODUCT, Layer, Matmul, PassWork, Temporaries
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig

Attention = Literal["math", "fused", "flash1", "flash2"]
Norm = Literal["unfused", "fused"]
Accumulation = Literal["separate", "fused"]


@dataclass(frozen=True, slots=True)
class _Scores:
    """The costs of attention's stored scores, per score.

    `memory`: elements read and written forward, by `kernels` kernels. `kept_bytes` are kept for backward.
    """

    memory: float
    kernels: int
    kept_bytes: float


# Fused: one kernel scales, masks and takes the softmax. The product writes, this kernel reads and writes, the
# second product reads; scores and their softmax are kept in 16 bits. Math: separate kernels each read and
# write, with the softmax in fp32, which is also kept.
_STORED_SCORES = {
    "fused": _Scores(memory=4.0, kernels=1, kept_bytes=4.0),
    "math": _Scores(memory=16.0, kernels=6, kept_bytes=8.0),
}
# fp32 log-sum-exp per token and head, which only kernels without stored scores need.
_LOG_SUM_EXP_BYTES = 4.0


@dataclass(frozen=True, slots=True)
class _RootNorm:
    """The costs of one RMS norm, per element of the stream; see `Layer` for the units."""

    memory: float
    kernels: int
    kept_bytes: float


# The counts of `weft.describe.families.block_parts`; one kernel that reads and writes; one kernel for each
# operation of the definition, with squares, roots and product in fp32.
_OWN_ROOT_NORM = _RootNorm(memory=4.0, kernels=4, kept_bytes=4.0)
_ROOT_NORMS = {
    "fused": _RootNorm(memory=2.0, kernels=1, kept_bytes=0.0),
    "unfused": _RootNorm(memory=16.0, kernels=6, kept_bytes=8.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """A program's kernels for a transformer.

    Attributes:
        attention: `math` stores scores in fp32 and in 16 bits, `fused` in 16 bits; `flash1` and `flash2`
            never store them.
        norm: one kernel per RMS norm, or one per operation. Layer norms are one kernel everywhere.
        sequence_parallel: tensor ranks divide the tokens of the stream between divided products, and gather
            them again for backward instead of keeping them.
        loss_parallel: the loss is computed from divided logits; else the logits are gathered.
        accumulation: separate kernels add up the weight gradients of micro-batches, or the products that
            compute them do.
    """

    attention: Attention = "flash2"
    norm: Norm = "fused"
    sequence_parallel: bool = True
    loss_parallel: bool = True
    accumulation: Accumulation = "separate"


def with_kernels(graph: LayerGraph, config: ModelConfig, kernels: Kernels) -> LayerGraph:
    """Return a transformer's graph from `layer_graph(config)` with other kernels."""
    known = {index: _with_kernels(graph.layers[index], config, kernels) for index in set(graph.alike)}
    layers = (
        replace(known[alike], name=own.name) for own, alike in zip(graph.layers, graph.alike, strict=True)
    )
    return replace(graph, layers=tuple(layers))


def _with_kernels(layer: Layer, config: ModelConfig, kernels: Kernels) -> Layer:
    if config.family == "llama" and layer.kind in ("block", "head"):
        layer = _with_norm(layer, config, kernels.norm)
    if layer.kind == "block":
        layer = with_attention(layer, config, kernels.attention)
    if layer.kind == "head" and not kernels.loss_parallel:
        layer = _with_gathered_logits(layer, config)
    if kernels.accumulation == "fused" and layer.kind in ("block", "head"):
        layer = _with_fused_accumulation(layer)
    return _with_stream(layer, config, divided=kernels.sequence_parallel)


def with_attention(layer: Layer, config: ModelConfig, attention: Attention) -> Layer:
    """Replace attention's kernel; selective recomputation repeats scores (Korthikanti et al., section 5)."""
    attends = tuple(matmul for matmul in layer.forward.matmuls if matmul.kernel != PLAIN_PRODUCT)
    # The input is always kept.
    rest = layer.kept + Amount.of(-config.hidden, batch=1, sequence=1, stream=1)
    stored = _STORED_SCORES.get(attention)
    if stored is None:
        layer = replace(
            layer,
            products=rest,
            product_bytes=layer.kept_bytes,
            freed_products=ZERO,
            again=PassWork(attends, kernels=1),
        )
        return _each_pass(layer, lambda work: replace(work, matmuls=_renamed(work.matmuls, attention)))
    scores = Amount.of(config.heads, batch=1, sequence=2, tensor=1)
    core = _renamed(attends, "scores")
    again = PassWork(matmuls=core, memory=scores * stored.memory, kernels=len(core) + stored.kernels)

    def computed(work: PassWork, times: float) -> PassWork:
        return PassWork(
            matmuls=_renamed(work.matmuls, "scores"),
            memory=work.memory + scores * (times * stored.memory),
            kernels=work.kernels + round(times * stored.kernels),
        )

    without = Amount.of(-_LOG_SUM_EXP_BYTES * config.heads, batch=1, sequence=1, tensor=1)
    return replace(
        layer,
        forward=computed(layer.forward, 1.0),
        backward_input=computed(layer.backward_input, 2.0),
        kept_bytes=layer.kept_bytes + without + scores * stored.kept_bytes,
        products=rest,
        product_bytes=layer.kept_bytes + without,
        freed_products=ZERO,
        # The gradients of the softmax and of the scores.
        temporaries=(*layer.temporaries, Temporaries(bytes=scores * stored.kept_bytes)),
        again=again,
    )


def _renamed(matmuls: tuple[Matmul, ...], kernel: str) -> tuple[Matmul, ...]:
    """Replace the kernel of attention's products; flash kernels still skip the masked part."""
    return tuple(
        one if one.kernel == PLAIN_PRODUCT else replace(one, kernel=_flavour(one.kernel, kernel))
        for one in matmuls
    )


def _flavour(own: str, kernel: str) -> str:
    return f"{kernel}-causal" if kernel != "scores" and own.endswith("-causal") else kernel


def _with_norm(layer: Layer, config: ModelConfig, norm: Norm) -> Layer:
    count = 2 if layer.kind == "block" else 1
    other = _ROOT_NORMS[norm]

    def per_stream_token(elements: float) -> Amount:
        return Amount.of(count * elements * config.hidden, batch=1, sequence=1, stream=1)

    memory = per_stream_token(other.memory - _OWN_ROOT_NORM.memory)
    launched = count * (other.kernels - _OWN_ROOT_NORM.kernels)
    return replace(
        layer,
        forward=_more(layer.forward, memory, launched),
        backward_input=_more(layer.backward_input, 2.0 * memory, 2 * launched),
        kept_bytes=layer.kept_bytes + per_stream_token(other.kept_bytes - _OWN_ROOT_NORM.kept_bytes),
    )


def _with_fused_accumulation(layer: Layer) -> Layer:
    """Remove the accumulation's traffic: the product hides it from about 1000 tokens per micro-batch on.
    An A100 then computes longer on a weight than it takes to move 8 bytes."""
    work = layer.backward_weight
    return replace(layer, backward_weight=PassWork(work.matmuls, kernels=len(work.matmuls)))


def _with_gathered_logits(layer: Layer, config: ModelConfig) -> Layer:
    """Let every tensor rank compute the whole loss after one all-gather, which costs half an all-reduce."""
    vocabulary = config.vocabulary

    def undivided(amount: Amount) -> Amount:
        return _mapped(amount, lambda powers: powers | {"tensor": 0} if powers["batch"] else powers)

    return replace(
        layer,
        kept=undivided(layer.kept),
        kept_bytes=undivided(layer.kept_bytes),
        products=undivided(layer.products or ZERO),
        freed=undivided(layer.freed),
        freed_bytes=undivided(layer.freed_bytes),
        freed_products=undivided(layer.freed_products),
        temporaries=tuple(
            replace(one, elements=undivided(one.elements), bytes=undivided(one.bytes), divided=None)
            for one in layer.temporaries
            if one.divided is not True
        ),
        forward=replace(layer.forward, memory=undivided(layer.forward.memory)),
        backward_input=replace(layer.backward_input, memory=undivided(layer.backward_input.memory)),
        tensor_reduced=layer.tensor_reduced + Amount.of(0.25 * vocabulary, batch=1, sequence=1),
    )


def _with_stream(layer: Layer, config: ModelConfig, *, divided: bool) -> Layer:
    """Put all tokens between divided products on every rank, or divide them and drop the gathered copies."""
    if not divided:

        def whole(amount: Amount) -> Amount:
            return _mapped(amount, lambda powers: powers | {"stream": 0})

        layer = _each_pass(layer, lambda work: replace(work, memory=whole(work.memory)))
        return replace(
            layer,
            kept=whole(layer.kept),
            kept_bytes=whole(layer.kept_bytes),
            products=whole(layer.products) if layer.products is not None else None,
            product_bytes=whole(layer.product_bytes),
            freed_products=whole(layer.freed_products),
            temporaries=tuple(
                replace(one, elements=whole(one.elements), bytes=whole(one.bytes))
                for one in layer.temporaries
            ),
            sent=whole(layer.sent),
        )
    gathered = {"block": 2.0, "head": 1.0}.get(layer.kind, 0.0) * config.hidden
    kept_whole = Amount.of(-gathered, batch=1, sequence=1) + Amount.of(
        gathered, batch=1, sequence=1, stream=1
    )
    kept = layer.products
    return replace(
        layer,
        kept=layer.kept + kept_whole,
        products=kept + kept_whole if kept is not None and layer.again is not None else kept,
        # One more all-gather per gathered input in backward; the amount counts half the all-reduces of both.
        tensor_reduced=layer.tensor_reduced + Amount.of(0.25 * gathered, batch=1, sequence=1),
    )


def _more(work: PassWork, memory: Amount, kernels: int) -> PassWork:
    return replace(work, memory=work.memory + memory, kernels=work.kernels + kernels)


def _each_pass(layer: Layer, edit: Callable[[PassWork], PassWork]) -> Layer:
    return replace(
        layer,
        forward=edit(layer.forward),
        backward_input=edit(layer.backward_input),
        backward_weight=edit(layer.backward_weight),
        again=edit(layer.again) if layer.again is not None else None,
    )


def _mapped(amount: Amount, edit: Callable[[dict[str, int]], dict[str, int]]) -> Amount:
    """Return the amount with edited powers of every term."""
    edited = (
        Amount.of(
            term.coefficient,
            **edit({key: value for key, value in asdict(term).items() if key != "coefficient"}),
        )
        for term in amount.terms
    )
    return sum(edited, ZERO)
