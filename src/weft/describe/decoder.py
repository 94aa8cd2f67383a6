"""`Decoder`: the architecture of a decoder of text, beside the sizes in `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from weft.describe.one_line import one_line

# How a norm computes. `rms` scales in the precision of the stream, `rms-fp32` in fp32. Of layer norms,
# `layer` has a weight and a bias.
Norm = Literal["rms", "rms-fp32", "layer", "layer-without-bias", "layer-without-weight"]
# Where the norms of a block stand: before its two branches, after them, or both. `parallel` branches read the
# block's input through one norm each, `shared` ones through one norm together.
Placement = Literal["before", "after", "around", "parallel", "shared"]
# The norm of queries and keys: one weight for all heads' vectors of head size, one weight per head, or one
# norm over all heads together.
QueryKeyNorm = Literal["none", "head", "own-heads", "together"]
# How a router scores experts: with probabilities of all together, or one by one.
Scores = Literal["softmax", "sigmoid"]
# The gate on attention's result: none; one for each element, by a product of its own or by that of queries;
# or one for each head.
Gate = Literal["none", "elements", "with-queries", "heads"]
# The decay of a linear attention's state: one learned for each head and token, one for each channel of keys
# and token, or a constant for each head.
Decay = Literal["head", "channel", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """Sizes of one block, where blocks differ.

    Attributes:
        heads, key_value_heads, head_size, feed_forward: those of the model, in this block. A block without
            heads of keys and values reads those of a block before it.
        keys_as_values: True if the product of keys makes the values, too.
    """

    heads: int
    key_value_heads: int
    head_size: int
    feed_forward: int
    keys_as_values: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInputs:
    """Sizes of vectors that all blocks read beside the stream, one of each token and block (Gemma 3n).

    They are rows of a table of their own, plus a product of the rows of the token table.

    Attributes:
        size: elements of a vector.
        rows: those of the table.
    """

    size: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Sizes of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Attributes:
        query_rank: elements of the latent vector of queries; 0 if queries are projected directly.
        key_value_rank: elements of the latent vector that keys and values share.
        plain_size, rotary_size: elements of a head's query without and with rotary positions.
        value_size: elements of a head's value.
    """

    query_rank: int
    key_value_rank: int
    plain_size: int
    rotary_size: int
    value_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Sizes of linear attention: a state of fixed size takes the place of keys and values.

    Sources: the gated delta rule (Yang et al., arXiv 2412.06464) for decays by head; Kimi Linear (arXiv
    2510.26692) for decays by channel; lightning attention (Qin et al., arXiv 2401.04658) for constant ones.

    Attributes:
        blocks: positions of the blocks that have it in place of attention.
        key_heads, value_heads: heads of queries and keys, and of values; the state has the latter's.
        key_size, value_size: elements of a head's query and key, and of its value.
        convolution: tokens that a convolution of queries, keys and values reads; 0 without one.
        decay: see its type.
        decay_rank, gate_rank: the inner side of the two products that make decays, or the gate of the result;
            0 for one product.
        placement: that of its blocks' norms; None: as in other blocks.
    """

    blocks: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    convolution: int = 0
    decay: Decay = "head"
    decay_rank: int = 0
    gate_rank: int = 0
    placement: Placement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """Sizes of indexers, which choose the tokens to which each token attends.

    They have no gradients (DeepSeek-V3.2, arXiv 2512.02556, section 2.1, trains them by a loss of their own).

    Attributes:
        heads, size: heads of an indexer, and the elements of their queries and of the key that they share.
        chosen: the most tokens to which a token attends.
        blocks: positions of the blocks with an indexer; the others use the choice of the block before.
    """

    heads: int
    size: int
    chosen: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Sizes of a mixture of gated feed-forwards.

    Attributes:
        count, active: experts of a block, and those that compute one token.
        width: columns of one expert.
        shared_width: columns of the experts that compute every token; 0 if there are none.
        shared_gate: True if a product of the token scales the result of the shared experts.
        router_parameters: parameters of the router per expert, beside its matrix.
        biases: True if the products of the experts have biases.
        scores: the function from a token's logits to its scores of all experts.
        choice_bias: True if a bias is added to scores for the choice of experts alone. It has no gradient.
        beside: True if blocks with experts have a plain feed-forward, too. Both have norms of their own, and
            the router scales its input.
        dense: positions of the blocks with a plain feed-forward in place of experts.
    """

    count: int
    active: int
    width: int
    shared_width: int = 0
    shared_gate: bool = False
    router_parameters: int = 0
    biases: bool = False
    scores: Scores = "softmax"
    choice_bias: bool = False
    beside: bool = False
    dense: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The architecture of a decoder; the default is Llama's.

    Attributes:
        head_size: elements of a head's query, key and value.
        norm, placement, query_key_norm: see their types.
        gated: True if a second product gates the feed-forward.
        joint_projection: True if one product computes queries, keys and values; values keep its whole result.
        query_bias, output_bias, feed_forward_bias, head_bias: True if these products have biases: of queries,
            keys and values; after attention; of the feed-forward; with the vocabulary.
        position_rows: rows of a learned table of positions beyond the longest sequence; None for rotary
            positions.
        scaled_embedding: True if the rows of the token table are scaled.
        attention_cap, logits_cap: True if a hyperbolic tangent bounds attention's scores, or the logits.
        sinks: True if attention has one more learned score per head.
        activation_parameters: parameters of the activation.
        attention_gate: see its type.
        keys_as_values: True if the product of keys makes the values, too.
        value_norm: True if a norm without a weight follows the product of values.
        block_sizes: sizes block by block; empty if all blocks have those of the model.
        undivided: True if tensor ranks cannot divide the blocks.
        windows: tokens to which each token of a block attends, block by block; 0 for all before it. Empty if
            no block has a window.
    """

    head_size: int
    norm: Norm = "rms"
    placement: Placement = "before"
    gated: bool = True
    joint_projection: bool = False
    query_bias: bool = False
    output_bias: bool = False
    feed_forward_bias: bool = False
    head_bias: bool = False
    query_key_norm: QueryKeyNorm = "none"
    position_rows: int | None = None
    scaled_embedding: bool = False
    attention_cap: bool = False
    logits_cap: bool = False
    sinks: bool = False
    activation_parameters: int = 0
    attention_gate: Gate = "none"
    keys_as_values: bool = False
    value_norm: bool = False
    block_sizes: tuple[BlockSizes, ...] = ()
    undivided: bool = False
    windows: tuple[int, ...] = ()
    block_inputs: BlockInputs | None = None
    latent: Latent | None = None
    linear: LinearAttention | None = None
    indexer: Indexer | None = None
    experts: Experts | None = None

    def __repr__(self) -> str:
        mixture = "" if self.experts is None else f", {self.experts.active} of {self.experts.count} experts"
        return one_line(self, f"heads of {self.head_size}, norms {self.norm} {self.placement}{mixture}")

    def window(self, block: int) -> int:
        """Return the attention window of a block in tokens; 0 for all tokens before."""
        return self.windows[block] if self.windows else 0

    def has_experts(self, block: int) -> bool:
        return self.experts is not None and block not in self.experts.dense

    def sizes_in(self, block: int) -> BlockSizes | None:
        """Return the own sizes of a block; None if it has those of the model."""
        return self.block_sizes[block] if self.block_sizes else None

    def linear_in(self, block: int) -> LinearAttention | None:
        """Return the linear attention of a block; None for one that attends to tokens."""
        return self.linear if self.linear is not None and block in self.linear.blocks else None


def decoder_from(record: Mapping[str, Any]) -> Decoder:
    """Build the decoder from its `dataclasses.asdict` record, also after a JSON round trip."""
    parts = dict(record)
    parts["windows"] = tuple(parts["windows"])
    if parts["latent"] is not None:
        parts["latent"] = Latent(**parts["latent"])
    parts["block_sizes"] = tuple(BlockSizes(**one) for one in parts.get("block_sizes", ()))
    if parts.get("block_inputs") is not None:
        parts["block_inputs"] = BlockInputs(**parts["block_inputs"])
    for name, kind in (("linear", LinearAttention), ("indexer", Indexer)):
        # Plan files of earlier versions lack these.
        if parts.get(name) is not None:
            parts[name] = kind(**{**parts[name], "blocks": tuple(parts[name]["blocks"])})
    if parts["experts"] is not None:
        parts["experts"] = Experts(**{**parts["experts"], "dense": tuple(parts["experts"]["dense"])})
    return Decoder(**parts)
