"""Linear attention as a part of a decoder's block: projections, a convolution, and a state of past tokens.

It is priced as torch's own operations compute it in `transformers`, with the tensors that autograd keeps.
With learned decays they are in fp32 for every precision. Tokens of a chunk are multiplied with each other.
Each head hands a state of (key size x value size) from chunk to chunk. So work and memory grow linearly with
the tokens (Yang et al., arXiv 2412.06464, section 3.2; Kimi Linear, arXiv 2510.26692, section 3.2; Qin
et al., arXiv 2401.04658, algorithm 1). Fused kernels of other packages keep less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.describe.amount import Amount
from weft.describe.decoder import LinearAttention
from weft.describe.families.block_parts import BlockPart, product_with_bias
from weft.describe.families.transformer import ACTIVATION, ONE, SEQUENCE, per_token
from weft.describe.layer import FP32_PRODUCT, Layer, Matmul, PassWork, Temporaries
from weft.describe.model import ModelConfig

_FP32_BYTES = 4.0
# Elements of 16 bits in one of fp32, and those that kernels beside products move for each kept element.
_WIDE, _MOVED = 2.0, 3.0


@dataclass(frozen=True, slots=True)
class _Rule:
    """The computation of a head's chunks.

    Attributes:
        chunk: its tokens.
        kernels, chunk_kernels: kernels before the chunks, and for each of them.
        keys, values, squares, scalars: kept per token, in numbers of keys, values, rows of a chunk's square
            and single elements.
        cubes: kept rows of a chunk's square for each channel of keys.
    """

    chunk: int
    kernels: int
    chunk_kernels: int
    keys: float
    values: float
    squares: float
    scalars: float
    cubes: float = 0.0

    def kept(self, linear: LinearAttention) -> float:
        """Return the kept elements per head and token; chunks keep the state before them."""
        key, value = linear.key_size, linear.value_size
        rows = self.chunk * (self.squares + self.cubes * key)
        return self.keys * key + self.values * value + rows + self.scalars + key * value / self.chunk


_CHUNK = 64
# Counted in the code of `transformers`; tests compare the sums with autograd. Decays by channel multiply keys
# with keys channel by channel, and invert the triangular system row by row.
_INVERSE = (_CHUNK - 1) * (2 * _CHUNK - 1) / 6 + _CHUNK / 2
_RULES = {
    "head": _Rule(_CHUNK, 40, 9, keys=8.0, values=6.0, squares=5.0, scalars=9.0),
    "channel": _Rule(_CHUNK, 550, 14, keys=16.0, values=6.0, squares=2.0, scalars=6.0 + _INVERSE, cubes=3.0),
    "constant": _Rule(256, 10, 10, keys=3.0, values=2.5, squares=1.0, scalars=0.0),
}


def linear_part(config: ModelConfig, linear: LinearAttention) -> BlockPart:
    """Return the products, the convolution and the state between the input of attention and its result."""
    rule = _RULES[linear.decay]
    keys, values = linear.key_heads * linear.key_size, linear.value_heads * linear.value_size
    mixed = 2 * keys + values
    parameters = linear.convolution * mixed + _decay_parameters(linear) + _norm_size(linear)
    state = per_token(linear.value_heads * _padded(config, rule) * rule.kept(linear))
    wide = linear.decay != "constant"
    # The inputs of the convolution and of its activation.
    read = (2.0 if linear.convolution else 1.0) * mixed
    return _projections(config, linear, keys, values) + BlockPart(
        attention=_state_products(config, linear, rule),
        parameters=Amount.of(parameters),
        # Then the inputs of the norm's weight, of the gate and of the last product.
        kept=per_token(read + (3.0 if wide else 5.0) * values + linear.value_heads * wide)
        + state * (not wide),
        kept_bytes=state * (_FP32_BYTES * wide),
        products=per_token(mixed if linear.convolution else 0.0),
        memory=per_token((2.0 + ACTIVATION) * mixed) + state * (_MOVED * (_WIDE if wide else 1.0)),
        kernels=rule.kernels + rule.chunk_kernels * _chunks(config, rule),
    )


def with_state(block: Layer, config: ModelConfig, linear: LinearAttention) -> Layer:
    """Return a block with linear attention; a kept product leaves the state to be computed again."""
    state = tuple(one for one in block.forward.matmuls if one.kernel == FP32_PRODUCT)
    kernels = block.forward.kernels - len(block.forward.matmuls) + len(state)
    again = PassWork(matmuls=state, memory=block.forward.memory, kernels=kernels)
    return replace(block, again=again, temporaries=(*block.temporaries, _gradients(config, linear)))


def _projections(config: ModelConfig, linear: LinearAttention, keys: int, values: int) -> BlockPart:
    """Return the products of tokens: to queries, keys, values, decays and gates, and to the stream."""
    width, heads = config.hidden, linear.value_heads
    decays = {"head": heads, "channel": keys, "constant": 0}[linear.decay]
    sizes = [(width, 2 * keys + values), (width, heads * (linear.decay != "constant"))]
    for rank, columns in ((linear.decay_rank, decays), (linear.gate_rank, values)):
        sizes += [(width, rank), (rank, columns)] if rank else [(width, columns)]
    found, made = BlockPart(), 0
    for inner, columns in (*sizes, (values, width)):
        if columns:
            product, parameters = product_with_bias(inner, columns, divided="", bias=False)
            found += BlockPart(weights=(product,), parameters=parameters)
            made += columns
    # Of two products, the second one keeps the inner vector.
    inside = per_token(linear.decay_rank + linear.gate_rank)
    return found + BlockPart(kept=inside, products=per_token(made - width))


def _decay_parameters(linear: LinearAttention) -> int:
    """Return the parameters of decays beside their products: a rate for each head, and biases."""
    if linear.decay == "constant":
        return 0
    return linear.value_heads * (1 + (linear.key_size if linear.decay == "channel" else 1))


def _norm_size(linear: LinearAttention) -> int:
    """Return the elements of the norm's weight; with constant decays, one norm reads all heads."""
    return linear.value_size * (linear.value_heads if linear.decay == "constant" else 1)


def _chunks(config: ModelConfig, rule: _Rule) -> int:
    return -(-config.sequence // rule.chunk)


def _padded(config: ModelConfig, rule: _Rule) -> float:
    """Return the tokens of whole chunks, per token; the last chunk of constant decays is shorter."""
    if rule is _RULES["constant"]:
        return 1.0
    return _chunks(config, rule) * rule.chunk / config.sequence


def _state_products(config: ModelConfig, linear: LinearAttention, rule: _Rule) -> tuple[Matmul, ...]:
    """Return the products of chunks and of the state, for all heads."""
    key, value, chunk = linear.key_size, linear.value_size, rule.chunk
    count = Amount.of(linear.value_heads * _padded(config, rule), batch=1)
    # Scores of a chunk with its values; queries with the state, and keys with values for the next one.
    sides = [(chunk, value), (key, value), (key, value)]
    if linear.decay == "constant":
        sides += [(key, chunk)]
    else:
        # The inverse of the triangular system with keys and values, and its result with the state.
        sides += [(chunk // (2 if linear.decay == "head" else 1), key + value), (key, value)]
    if linear.decay == "head":
        # Queries with keys, and keys with keys.
        sides += [(key, 2 * chunk)]
    return tuple(
        Matmul(count=count, rows=SEQUENCE, inner=ONE * inner, columns=ONE * columns, kernel=FP32_PRODUCT)
        for inner, columns in sides
    )


def _gradients(config: ModelConfig, linear: LinearAttention) -> Temporaries:
    """Return the moment in which the gradients of the tensors of all chunks are there."""
    rule = _RULES[linear.decay]
    each = 4.0 * linear.key_size + 3.0 * linear.value_size + 2.0 * rule.chunk
    each += rule.chunk * linear.key_size * (1.0 if rule.cubes else 0.0)
    heads = linear.value_heads * _padded(config, rule)
    return Temporaries(bytes=per_token(_FP32_BYTES * heads * each))
