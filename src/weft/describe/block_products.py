"""The linear layers of a model's blocks, by their names in `transformers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from weft.describe.decoder_row import ROWS
from weft.describe.model import ModelConfig
from weft.errors import InputError, Violation

# The value that a linear layer multiplies.
Read = Literal["attention input", "attention output", "feed-forward input", "activation"]
# Of families that are no decoders with a row.
_NAMES = {
    "gpt": (("c_attn", "c_proj"), ("c_fc", "c_proj")),
    "bert": (("query", "key", "value", "dense"), ("dense", "dense")),
    "vit": (("q_proj", "k_proj", "v_proj", "o_proj"), ("fc1", "fc2")),
}


@dataclass(frozen=True, slots=True)
class BlockProduct:
    """A linear layer of every block: (tokens x inner) by (inner x columns).

    Attributes:
        name: the last part of its name in `transformers`.
        reads: its operand; linear layers that read the same keep it once for their backward passes.
        divided: the side that tensor ranks divide, `columns` or `inner`.
    """

    name: str
    inner: int
    columns: int
    reads: Read

    @property
    def divided(self) -> Literal["columns", "inner"]:
        return "columns" if self.reads.endswith(" input") else "inner"

    @property
    def in_attention(self) -> bool:
        return self.reads.startswith("attention")


def block_products(config: ModelConfig) -> tuple[BlockProduct, ...]:
    """Return the linear layers of a model's blocks, in the order of the block; experts are none.

    Those of a plain feed-forward belong to the blocks that have one (`products_in`).

    Raises:
        InputError: for a family whose linear layers weft cannot name.
    """
    attention, feed_forward = _names(config)
    queries, keys, inner, gated = config.hidden, config.hidden, config.feed_forward, False
    if config.family not in _NAMES:
        decoder = config.architecture
        queries, keys = config.heads * decoder.head_size, config.key_value_heads * decoder.head_size
        gated = decoder.gated
    in_attention = (
        *_reading("attention input", attention[:-1], config.hidden, (queries, keys, keys)),
        BlockProduct(attention[-1], queries, config.hidden, "attention output"),
    )
    if all(has_experts(config, block) for block in range(config.layers)):
        return in_attention
    return (
        *in_attention,
        *_reading("feed-forward input", feed_forward[:-1], config.hidden, (inner,) * (1 + gated)),
        BlockProduct(feed_forward[-1], inner, config.hidden, "activation"),
    )


def has_experts(config: ModelConfig, block: int) -> bool:
    """Return True if a block has experts in place of a plain feed-forward."""
    return config.decoder is not None and config.decoder.has_experts(block)


def products_in(config: ModelConfig, block: int, products: Sequence[BlockProduct]) -> list[BlockProduct]:
    """Return those linear layers that a block has; of one with experts, attention's."""
    mixture = has_experts(config, block)
    return [one for one in products if one.in_attention or not mixture]


def _names(config: ModelConfig) -> tuple[Sequence[str], Sequence[str]]:
    if config.family in _NAMES:
        return _NAMES[config.family]
    row = ROWS.get(config.family)
    # Of other families, blocks may have no heads at all.
    decoder = None if row is None else config.architecture
    alike = decoder and decoder.latent is None and decoder.linear is None and not decoder.block_sizes
    if row is None or not alike:
        known = (
            f"{', '.join(sorted(_NAMES))}, and of decoders with a row, without latent or linear attention, "
            "and with alike heads in all blocks"
        )
        problem = f"{config.name} is of the family {config.family!r}; linear layers are known of {known}"
        raise InputError(Violation("model", problem))
    return row.attention_products, row.feed_forward_products


def _reading(reads: Read, names: Sequence[str], inner: int, columns: Sequence[int]) -> list[BlockProduct]:
    """Return the layers that read one operand, one for each size or one for all of them together."""
    sizes = columns if len(names) == len(columns) else (sum(columns),)
    return [BlockProduct(name, inner, size, reads) for name, size in zip(names, sizes, strict=True)]
