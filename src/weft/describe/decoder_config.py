"""The sizes and the architecture of a decoder, read from a `config.json` by a row of the table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from weft.describe.decoder import BlockInputs, Decoder, Experts, Indexer, Latent, LinearAttention
from weft.describe.decoder_given import Given
from weft.describe.decoder_kinds import (
    LINEAR,
    blocks_with_indexers,
    blocks_without_experts,
    kinds_of_blocks,
    sizes_of_blocks,
    windows_of_blocks,
)
from weft.describe.decoder_row import BlockInputKeys, DecoderRow, ExpertKeys, Fact, IndexerKeys, LinearKeys
from weft.describe.hub_sizes import group_problems, head_problems, read_sizes, tied_problems
from weft.describe.model import ModelConfig, read_constants
from weft.errors import InputError

_REQUIRED = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
    "vocabulary": "vocab_size",
    "sequence": "max_position_embeddings",
}
_OPTIONAL = {"key_value_heads": "num_key_value_heads", "head_size": "head_dim"}
_LATENT = {
    "key_value_rank": "kv_lora_rank",
    "plain_size": "qk_nope_head_dim",
    "rotary_size": "qk_rope_head_dim",
    "value_size": "v_head_dim",
}
# The families of GPT-J leave out a width of four times the hidden size.
_FEED_FORWARDS = ("n_inner", "ffn_hidden_size")
# The fields of `Decoder` that a row has too, and those that a key of the file may decide. Of those
# that are tables, a row names only the keys.
_SHARED = {field.name for field in fields(Decoder)} & DecoderRow.model_fields.keys() - {
    "block_inputs",
    "latent",
    "indexer",
    "linear",
    "experts",
}
_FACTS = {name for name in _SHARED if DecoderRow.model_fields[name].annotation == Fact}


def read_decoder(record: Mapping[str, Any], row: DecoderRow, name: str, where: str) -> ModelConfig:
    """Read the sizes and the architecture in a `config.json`.

    Args:
        row: the row of its `model_type`.
        name: the name of the model.
        where: the file, in messages.

    Raises:
        InputError: with all mistakes of the file.
    """
    row = row.chosen(record)
    given = Given(row.stated(record), where)
    sizes = _sizes(given, row)
    constants, wrong = read_constants(record, str(record["model_type"]), where)
    given.problems += [*tied_problems(record, where), *row.problems(record, where), *wrong]
    decoder = _decoder(given, row, sizes)
    if given.problems:
        raise InputError(given.problems)
    sizes.pop("head_size")
    sizes.setdefault("key_value_heads", sizes["heads"])
    sizes.setdefault("feed_forward", 4 * sizes["hidden"])
    tied = record.get("tie_word_embeddings")
    return ModelConfig(
        name=name,
        family=str(record["model_type"]),
        tied_embeddings=row.tied if tied is None else tied,
        norm_epsilon=constants.get("norm_epsilon"),
        rotary_base=constants.get("rotary_base"),
        decoder=decoder,
        record=json.dumps(record, sort_keys=True),
        **sizes,
    )


def _sizes(given: Given, row: DecoderRow) -> dict[str, Any]:
    """Return the sizes by their names, with that of a head; note their mistakes."""
    required, optional = {**_REQUIRED, **row.keys}, dict(_OPTIONAL)
    if "key_value_heads" in row.keys:
        optional["key_value_heads"] = required.pop("key_value_heads")
    if required["feed_forward"] in _FEED_FORWARDS:
        optional["feed_forward"] = required.pop("feed_forward")
    if row.latent:
        # Every head has its own keys, and their sizes have keys of their own.
        optional = {}
    sizes, problems = read_sizes(given.record, required, optional, given.where)
    keys = {**required, **optional}
    if row.single_key_value_head:
        sizes["key_value_heads"] = 1
    if "key_value_heads" in keys:
        problems += group_problems(sizes, keys, given.where)
    if "head_size" not in sizes and {"hidden", "heads"} <= sizes.keys():
        problems += [] if row.latent else head_problems(sizes, keys, given.where)
        sizes["head_size"] = sizes["hidden"] // sizes["heads"]
    given.problems += problems
    return sizes


def _decoder(given: Given, row: DecoderRow, sizes: Mapping[str, int]) -> Decoder:
    """Return the architecture, and note its mistakes."""
    layers, head_size = sizes.get("layers", 0), sizes.get("head_size", 0)
    kinds = kinds_of_blocks(given, row, layers)
    # Typed loosely because the fields have several types.
    stated: dict[str, Any] = {name: getattr(row, name) for name in _SHARED}
    stated |= {name: given.fact(stated[name]) for name in _FACTS}
    return Decoder(
        head_size=head_size,
        windows=windows_of_blocks(given, row, kinds),
        block_sizes=() if row.sizes is None else sizes_of_blocks(given, row.sizes, kinds, sizes),
        latent=_latent(given) if row.latent else None,
        linear=None if row.linear is None else _linear(given, row.linear, kinds, sizes),
        indexer=None if row.indexer is None else _indexer(given, row.indexer, layers),
        block_inputs=None if row.block_inputs is None else _block_inputs(given, row.block_inputs),
        experts=None if row.experts is None else _experts(given, row.experts, layers),
        **stated,
    )


def _latent(given: Given) -> Latent:
    # Without a rank, queries are projected directly.
    return Latent(
        query_rank=given.count("q_lora_rank", least=0) if "q_lora_rank" in given.record else 0,
        **{size: given.count(key) for size, key in _LATENT.items()},
    )


def _linear(
    given: Given, keys: LinearKeys, kinds: Sequence[str], sizes: Mapping[str, int]
) -> LinearAttention | None:
    blocks = tuple(index for index, kind in enumerate(kinds) if kind == LINEAR)
    if not blocks:
        return None

    def size(names: Sequence[str], own: str) -> int:
        return given.count(*names) if names else sizes.get(own, 0)

    key_size = size(keys.key_size, "head_size")
    return LinearAttention(
        blocks=blocks,
        key_heads=size(keys.key_heads, "heads"),
        value_heads=size(keys.value_heads, "heads"),
        key_size=key_size,
        value_size=size(keys.value_size, "head_size"),
        convolution=given.count(*keys.convolution) if keys.convolution else 0,
        decay=keys.decay,
        decay_rank=keys.low_rank * key_size,
        gate_rank=keys.low_rank * key_size,
        placement=keys.placement,
    )


def _indexer(given: Given, keys: IndexerKeys, layers: int) -> Indexer:
    return Indexer(
        heads=given.count(keys.heads),
        size=given.count(keys.size),
        chosen=given.count(keys.chosen),
        blocks=blocks_with_indexers(given, keys, layers),
    )


def _block_inputs(given: Given, keys: BlockInputKeys) -> BlockInputs | None:
    if not given.value(keys.size):
        return None
    return BlockInputs(size=given.count(keys.size), rows=given.count(keys.rows))


def _experts(given: Given, keys: ExpertKeys, layers: int) -> Experts | None:
    if keys.switch and not given.fact(keys.switch):
        return None
    width = given.count(*keys.width)
    shared = given.count(keys.shared, least=0) * width if keys.shared else 0
    if keys.shared_width:
        shared = given.count(keys.shared_width)
    count, active = given.count(*keys.count), given.count(*keys.active)
    if active > count:
        given.note(keys.active[0], f"{active} active experts of {count}", str(count))
    return Experts(
        count=count,
        active=active,
        width=width,
        shared_width=shared,
        shared_gate=keys.shared_gate,
        router_parameters=keys.router_parameters,
        biases=keys.biases,
        scores=keys.scores,
        choice_bias=keys.choice_bias,
        beside=keys.beside,
        dense=blocks_without_experts(given, keys, layers),
    )
