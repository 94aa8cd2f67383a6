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
    undivided: bool = False
    windows: tuple[int, ...] = ()
    latent: Latent | None = None
    experts: Experts | None = None

    def __repr__(self) -> str:
        mixture = "" if self.experts is None else f", {self.experts.active} of {self.experts.count} experts"
        return one_line(self, f"heads of {self.head_size}, norms {self.norm} {self.placement}{mixture}")

    def window(self, block: int) -> int:
        """Return the attention window of a block in tokens; 0 for all tokens before."""
        return self.windows[block] if self.windows else 0

    def has_experts(self, block: int) -> bool:
        return self.experts is not None and block not in self.experts.dense


def decoder_from(record: Mapping[str, Any]) -> Decoder:
    """Build the decoder from its `dataclasses.asdict` record, also after a JSON round trip."""
    parts = dict(record)
    parts["windows"] = tuple(parts["windows"])
    if parts["latent"] is not None:
        parts["latent"] = Latent(**parts["latent"])
    if parts["experts"] is not None:
        parts["experts"] = Experts(**{**parts["experts"], "dense": tuple(parts["experts"]["dense"])})
    return Decoder(**parts)
