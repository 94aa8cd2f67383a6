"""`DecoderRow`: how a `model_type` of `transformers` states the architecture of its decoder.

The rows stand in `decoders.toml`. A `config.json` of a type without a row may state its own, as the object
`weft_decoder`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError

from weft.describe.decoder import Decay, Gate, Norm, Placement, QueryKeyNorm, Scores
from weft.describe.reading import violations_of
from weft.describe.toml_table import TOML_ARRAY, Scalar, TomlTable
from weft.describe.units import shown
from weft.errors import InputError, Violation

# The object of a `config.json` that describes a decoder of a type without a row.
OWN_ROW = "weft_decoder"
# The keys that it must have: no value of theirs is more usual than another.
_NEEDED = ("norm", "placement", "gated", "query_bias", "output_bias", "feed_forward_bias", "query_key_norm")

# True, false, or the key of a `config.json` that decides.
Fact = bool | str
Keys = Annotated[tuple[str, ...], TOML_ARRAY]


class ExpertKeys(TomlTable):
    """The keys of a mixture; of several keys, the first present one counts.

    Attributes:
        count, active, width: see `weft.describe.decoder.Experts`.
        shared, shared_width: the number of shared experts of `width`, or their columns.
        shared_gate, router_parameters, biases, scores, choice_bias, beside: the same attributes of `Experts`.
        switch: a key of the file without which no block has experts.
        first_dense, dense_blocks, step: the number of blocks without experts at the start; the list of
            others; every how many blocks one has experts.
    """

    count: Keys = ("num_experts", "num_local_experts")
    active: Keys = ("num_experts_per_tok",)
    width: Keys = ("moe_intermediate_size",)
    shared: str | None = None
    shared_width: str | None = None
    shared_gate: bool = False
    router_parameters: int = 0
    biases: bool = False
    scores: Scores = "softmax"
    choice_bias: bool = False
    beside: bool = False
    switch: str | None = None
    first_dense: str | None = None
    dense_blocks: str | None = None
    step: str | None = None


class LinearKeys(TomlTable):
    """The keys of linear attention; of several keys, the first present one counts.

    A key `a.b` is the key `b` of an object `a`.

    Attributes:
        key_heads, value_heads, key_size, value_size, convolution: see
            `weft.describe.decoder.LinearAttention`; without keys, the sizes are those of attention.
        decay, placement: the same attributes of `LinearAttention`.
        low_rank: True if decays and gates are made by two products, with an inner side of `key_size`.
        listed: the key of a list with the numbers, from 1, of the blocks that attend to tokens.
    """

    key_heads: Keys = ("linear_num_key_heads",)
    value_heads: Keys = ("linear_num_value_heads",)
    key_size: Keys = ("linear_key_head_dim",)
    value_size: Keys = ("linear_value_head_dim",)
    convolution: Keys = ("linear_conv_kernel_dim",)
    decay: Decay = "head"
    placement: Placement | None = None
    low_rank: bool = False
    listed: str | None = None


class IndexerKeys(TomlTable):
    """The keys of indexers.

    Attributes:
        heads, size, chosen: see `weft.describe.decoder.Indexer`.
        kinds: a list with the kind of each block's indexer; one of the kind `full` has its own.
        interval, offset: without the list, every how many blocks one has its own, and the blocks before them
            that all have their own, plus 1.
    """

    heads: str = "index_n_heads"
    size: str = "index_head_dim"
    chosen: str = "index_topk"
    kinds: str = "indexer_types"
    interval: str = "index_topk_freq"
    offset: str = "index_skip_topk_offset"


class SizeKeys(TomlTable):
    """The keys of sizes that differ from block to block; `per_layer_config` of the file takes precedence.

    Attributes:
        counts: a list with the heads of each block.
        shared: the number of blocks at the end that read the keys and values of a block before them, and
            `doubled` a switch of twice the feed-forward in these.
        full_size, full_key_value_heads: the same sizes of blocks that attend to all tokens before.
        keys_as_values: if true, the product of keys makes the values of these blocks, too. Without it, they
            have the model's heads of keys and values.
    """

    counts: str | None = None
    full_size: str | None = None
    full_key_value_heads: str | None = None
    keys_as_values: str | None = None
    shared: str | None = None
    doubled: str | None = None


class BlockInputKeys(TomlTable):
    """The keys of vectors that all blocks read beside the stream; see `weft.describe.decoder.BlockInputs`.

    Without the key of `size`, or with zero, there are none.
    """

    size: str = "hidden_size_per_layer_input"
    rows: str = "vocab_size_per_layer_input"


class DecoderRow(TomlTable):
    """One row of the table; the default is Llama's. Facts are those of `weft.describe.decoder.Decoder`.

    Attributes:
        trained: True if weft's runtime trains the models; else they are planned only. `exported`: True if it
            then also knows the names of their tensors in files.
        undivided: True if weft's tensor ranks cannot divide the blocks.
        tied: True if embeddings are tied unless `tie_word_embeddings` says otherwise.
        keys: the keys of sizes, where they are not those of Llama.
        defaults: values of keys that a `config.json` may lack.
        unsupported: keys that must be absent, null, false or zero.
        required: keys with the only supported value, unless absent or null.
        window, window_switch: the keys of the attention window, and of a switch that turns windows on.
        first_window: the key of the number of blocks at the start without a window.
        full_every: every how many blocks one attends to all tokens before; 0 for never. `full_first`: the
            first of them, and not the last. `interval`: a key of the file that replaces the number. The other
            blocks have a window or linear attention.
        full_last: True if the last block of the model is one of them, too.
        kinds: the kinds of a period of blocks, where they are more. A list `layer_types` in the `config.json`
            takes precedence over all of these.
        latent: True for the keys of latent attention of DeepSeek-V2.
        single_key_value_head: True if all heads share the keys and values of one.
        attention_products: the names in `transformers` of attention's linear layers: of queries, keys and
            values together or apart, then of the output.
        feed_forward_products: those of the feed-forward: of gate and columns together or apart, then last.
        variants: changes of the row for files with the values in `when`.
    """

    like: str | None = None
    trained: bool = False
    exported: bool = True
    undivided: bool = False
    tied: bool = False
    norm: Norm = "rms"
    placement: Placement = "before"
    gated: bool = True
    joint_projection: bool = False
    query_bias: Fact = False
    output_bias: Fact = False
    feed_forward_bias: Fact = False
    head_bias: Fact = False
    query_key_norm: QueryKeyNorm = "none"
    position_rows: int | None = None
    scaled_embedding: Fact = False
    attention_cap: Fact = False
    logits_cap: Fact = False
    sinks: bool = False
    activation_parameters: int = 0
    window: str | None = None
    window_switch: str | None = None
    first_window: str | None = None
    full_every: int = 0
    full_first: bool = False
    full_last: bool = False
    interval: str | None = None
    kinds: Keys = ()
    attention_gate: Gate = "none"
    value_norm: bool = False
    sizes: SizeKeys | None = None
    block_inputs: BlockInputKeys | None = None
    linear: LinearKeys | None = None
    indexer: IndexerKeys | None = None
    latent: bool = False
    single_key_value_head: bool = False
    attention_products: Keys = ("q_proj", "k_proj", "v_proj", "o_proj")
    feed_forward_products: Keys = ("gate_proj", "up_proj", "down_proj")
    experts: ExpertKeys | None = None
    keys: Mapping[str, str] = Field(default_factory=dict)
    defaults: Mapping[str, Scalar] = Field(default_factory=dict)
    unsupported: Keys = ()
    required: Mapping[str, Scalar] = Field(default_factory=dict)
    variants: Annotated[tuple[Mapping[str, Any], ...], TOML_ARRAY] = ()

    def stated(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of a `config.json` that are not null, and the defaults of absent keys."""
        return {key: value for key, value in {**self.defaults, **record}.items() if value is not None}

    def chosen(self, record: Mapping[str, Any]) -> Self:
        """Return the row with the changes of its variants for a `config.json`."""
        stated = self.stated(record)
        changes: dict[str, Any] = {}
        for variant in self.variants:
            if all(stated.get(key, False) == value for key, value in variant["when"].items()):
                changes |= {key: value for key, value in variant.items() if key != "when"}
        return self.model_copy(update=changes)

    def problems(self, record: Mapping[str, Any], where: str) -> Iterator[Violation]:
        """Yield one violation for each key whose value the row does not describe."""
        for key in self.unsupported:
            if record.get(key) not in (None, False, 0):
                near = "false" if record[key] is True else "null"
                yield Violation(f"{where}: {key}", f"{shown(record[key])} is not supported", near)
        for key, value in self.required.items():
            if record.get(key) not in (None, value):
                problem = f"{shown(record[key])} is not supported"
                yield Violation(f"{where}: {key}", problem, str(value).lower())


def _rows() -> Mapping[str, DecoderRow]:
    text = files("weft.describe").joinpath("decoders.toml").read_text(encoding="utf-8")
    rows: dict[str, DecoderRow] = {}
    for name, given in tomllib.loads(text).items():
        like = rows[given["like"]].model_dump(exclude_unset=True) if "like" in given else {}
        rows[name] = DecoderRow(**{**like, "trained": False, **given})
    return MappingProxyType(rows)


# The rows by `model_type`, in the order of `decoders.toml`, and the types that the runtime trains.
ROWS = _rows()
TRAINED = tuple(name for name, row in ROWS.items() if row.trained)


def own_row(record: Mapping[str, Any], where: str) -> DecoderRow:
    """Return the row that a `config.json` of a type without a row states.

    Raises:
        InputError: naming the missing keys in one line; else with all mistakes of the row.
    """
    given = record.get(OWN_ROW)
    stated = given if isinstance(given, dict) else {}
    missing = [key for key in _NEEDED if key not in stated]
    text = record.get("text_config")
    inner = text.get("model_type") if isinstance(text, dict) else None
    if not stated and inner in ROWS:
        what = f"{shown(record.get('model_type'))} has parts beside its text, which weft does not know"
        problem = f"{what}; to plan the text alone, give the object text_config ({inner}) as a config.json"
        raise InputError(Violation(f"{where}: model_type", problem))
    if missing:
        what = f"{shown(record.get('model_type'))} has no row in the table of decoders"
        problem = f"{what}; to plan it, state {', '.join(missing)} in an object {OWN_ROW}"
        raise InputError(Violation(f"{where}: model_type", problem))
    try:
        return DecoderRow(**stated)
    except ValidationError as error:
        raise InputError(violations_of(error, f"{where}: {OWN_ROW}", DecoderRow)) from None
