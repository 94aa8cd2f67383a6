"""The kinds of a decoder's blocks: how each attends, and whether it has experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from weft.describe.decoder import BlockSizes
from weft.describe.decoder_given import Given
from weft.describe.decoder_row import DecoderRow, ExpertKeys, IndexerKeys, SizeKeys
from weft.describe.units import shown

# Attention to all tokens before, to a window of them, to a state in place of tokens, and to chosen tokens.
FULL, SLIDING, LINEAR, INDEXED = (f"{kind}_attention" for kind in ("full", "sliding", "linear", "indexed"))
# Changes of keys for single blocks, by their positions.
_OWN = "per_layer_config"
_OWN_SIZES = {
    "num_attention_heads": "heads",
    "num_key_value_heads": "key_value_heads",
    "head_dim": "head_size",
}


def kinds_of_blocks(given: Given, row: DecoderRow, layers: int) -> tuple[str, ...]:
    """Return how every block attends: by the list of the file, or by the rule of the row."""
    listed = given.entries("layer_types", layers)
    if listed is None:
        return _by_rule(given, row, layers)
    more = {LINEAR: row.linear, INDEXED: row.indexer}
    known = (FULL, SLIDING, *(kind for kind, keys in more.items() if keys is not None))
    others = [kind for kind in listed if kind not in known]
    if others:
        given.note("layer_types", f"{shown(others[0])} is not supported", FULL)
    return tuple(listed)


def windows_of_blocks(given: Given, row: DecoderRow, kinds: Sequence[str]) -> tuple[int, ...]:
    """Return the attention window of every block; empty if no block has one."""
    if not _has_windows(given, row) or SLIDING not in kinds:
        return ()
    window = given.count(str(row.window))
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def blocks_without_experts(given: Given, keys: ExpertKeys, layers: int) -> tuple[int, ...]:
    kinds = given.entries("mlp_layer_types", layers)
    if kinds is not None:
        return tuple(index for index, kind in enumerate(kinds) if kind == "dense")
    first = given.count(keys.first_dense, least=0) if keys.first_dense else 0
    step = given.count(keys.step) if keys.step and keys.step in given.record else 1
    named = given.record.get(keys.dense_blocks) if keys.dense_blocks else None
    dense = {*range(min(first, layers)), *(index for index in range(layers) if (index + 1) % step)}
    if isinstance(named, list):
        dense |= {index for index in named if isinstance(index, int) and index < layers}
    return tuple(sorted(dense))


def sizes_of_blocks(
    given: Given, keys: SizeKeys, kinds: Sequence[str], sizes: Mapping[str, int]
) -> tuple[BlockSizes, ...]:
    """Return the sizes of every block; empty if all have those of the model."""
    if not {"heads", "head_size", "feed_forward"} <= sizes.keys():
        return ()
    usual = BlockSizes(
        heads=sizes["heads"],
        key_value_heads=sizes.get("key_value_heads", sizes["heads"]),
        head_size=sizes["head_size"],
        feed_forward=sizes["feed_forward"],
    )
    counts = given.entries(keys.counts, len(kinds)) if keys.counts else None
    full = _full_sizes(given, keys, usual)
    found = [
        replace(full if kind == FULL else usual, **({} if counts is None else {"heads": count}))
        for kind, count in zip(kinds, counts or kinds, strict=True)
    ]
    own = given.value(_OWN)
    for index, changes in own.items() if isinstance(own, Mapping) else ():
        found[int(index)] = replace(
            found[int(index)], **{size: changes[key] for key, size in _OWN_SIZES.items() if key in changes}
        )
    shared = given.count(keys.shared, least=0) if keys.shared and keys.shared in given.record else 0
    factor = 2 if keys.doubled and given.fact(keys.doubled) else 1
    for index in range(max(0, len(found) - shared), len(found)):
        found[index] = replace(found[index], key_value_heads=0, feed_forward=factor * usual.feed_forward)
    return tuple(found) if any(one != usual for one in found) else ()


def _full_sizes(given: Given, keys: SizeKeys, usual: BlockSizes) -> BlockSizes:
    shared = bool(keys.keys_as_values) and given.fact(str(keys.keys_as_values))
    full = replace(usual, keys_as_values=shared)
    if given.value(_OWN) is not None:
        return full
    if keys.full_size and given.value(keys.full_size) is not None:
        full = replace(full, head_size=given.count(keys.full_size))
    grouped = keys.full_key_value_heads if shared or not keys.keys_as_values else None
    if grouped and given.value(grouped) is not None:
        full = replace(full, key_value_heads=given.count(grouped))
    return full


def blocks_with_indexers(given: Given, keys: IndexerKeys, layers: int) -> tuple[int, ...]:
    kinds = given.entries(keys.kinds, layers)
    if kinds is not None:
        return tuple(index for index, kind in enumerate(kinds) if kind == "full")
    every = given.count(keys.interval) if keys.interval in given.record else 1
    offset = given.count(keys.offset) if keys.offset in given.record else 2
    return tuple(index for index in range(layers) if max(index - offset + 1, 0) % every == 0)


def _has_windows(given: Given, row: DecoderRow) -> bool:
    if row.window is None or given.record.get(row.window) in (None, 0):
        return False
    return not row.window_switch or bool(given.record.get(row.window_switch, False))


def _by_rule(given: Given, row: DecoderRow, layers: int) -> tuple[str, ...]:
    if row.kinds:
        return tuple(row.kinds[index % len(row.kinds)] for index in range(layers))
    other = SLIDING if row.linear is None else LINEAR
    if other == SLIDING and not _has_windows(given, row):
        return (FULL,) * layers
    numbers = given.value(row.linear.listed) if row.linear is not None and row.linear.listed else None
    if isinstance(numbers, list):
        return tuple(FULL if index + 1 in numbers else other for index in range(layers))
    if row.first_window:
        first = given.count(row.first_window, least=0)
        return tuple(other if index >= first else FULL for index in range(layers))
    every = given.count(row.interval) if row.interval and row.interval in given.record else row.full_every
    place = 0 if row.full_first else every - 1
    last = layers - 1 if row.full_last else None
    return tuple(
        FULL if index == last or (every and index % every == place) else other for index in range(layers)
    )
