"""The sizes and the architecture of a decoder, read from a `config.json` by a row of the table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from weft.describe.decoder import Decoder, Experts, Latent
from weft.describe.decoder_row import DecoderRow, ExpertKeys, Fact
from weft.describe.hub_sizes import group_problems, head_problems, read_sizes, tied_problems
from weft.describe.model import ModelConfig, read_constants
from weft.describe.units import shown
from weft.errors import InputError, Violation

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
# The fields of `Decoder` that a row has too, and those that a key of the file may decide. Of latent attention
# and experts a row names only the keys.
_SHARED = {field.name for field in fields(Decoder)} & DecoderRow.model_fields.keys() - {"latent", "experts"}
_FACTS = {name for name in _SHARED if DecoderRow.model_fields[name].annotation == Fact}
_KINDS_OF_LAYERS = ("full_attention", "sliding_attention")


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
    given = _Given(row.stated(record), where)
    sizes = given.sizes(row)
    constants, wrong = read_constants(record, str(record["model_type"]), where)
    given.problems += [*tied_problems(record, where), *row.problems(record, where), *wrong]
    decoder = given.decoder(row, sizes.pop("head_size", 0), sizes.get("layers", 0))
    if given.problems:
        raise InputError(given.problems)
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


class _Given:
    """The keys of one `config.json`, with the defaults of its row, and the mistakes found in them."""

    def __init__(self, record: Mapping[str, Any], where: str) -> None:
        self.record = record
        self.where = where
        self.problems: list[Violation] = []

    def sizes(self, row: DecoderRow) -> dict[str, Any]:
        """Return the sizes by their names, with that of a head; note their mistakes."""
        required, optional = {**_REQUIRED, **row.keys}, dict(_OPTIONAL)
        if "key_value_heads" in row.keys:
            optional["key_value_heads"] = required.pop("key_value_heads")
        if required["feed_forward"] in _FEED_FORWARDS:
            optional["feed_forward"] = required.pop("feed_forward")
        if row.latent:
            # Every head has its own keys, and their sizes have keys of their own.
            optional = {}
        sizes, problems = read_sizes(self.record, required, optional, self.where)
        keys = {**required, **optional}
        if row.single_key_value_head:
            sizes["key_value_heads"] = 1
        if "key_value_heads" in keys:
            problems += group_problems(sizes, keys, self.where)
        if "head_size" not in sizes and {"hidden", "heads"} <= sizes.keys():
            problems += [] if row.latent else head_problems(sizes, keys, self.where)
            sizes["head_size"] = sizes["hidden"] // sizes["heads"]
        self.problems += problems
        return sizes

    def decoder(self, row: DecoderRow, head_size: int, layers: int) -> Decoder:
        """Return the architecture, and note its mistakes."""
        # Typed loosely because the fields have several types.
        stated: dict[str, Any] = {name: getattr(row, name) for name in _SHARED}
        stated |= {name: self.fact(stated[name]) for name in _FACTS}
        return Decoder(
            head_size=head_size,
            windows=self.windows(row, layers),
            latent=self.latent() if row.latent else None,
            experts=None if row.experts is None else self.experts(row.experts, layers),
            **stated,
        )

    def fact(self, fact: Fact) -> bool:
        return bool(self.record.get(fact, False)) if isinstance(fact, str) else fact

    def count(self, *keys: str, least: int = 1) -> int:
        """Return the integer of the first present key; note a violation if there is none of `least`."""
        key = next((key for key in keys if key in self.record), keys[0])
        value = self.record.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        problem = (
            f"{shown(value)}: must be an integer of at least {least}" if key in self.record else "missing"
        )
        self.problems.append(Violation(f"{self.where}: {key}", problem))
        return least

    def latent(self) -> Latent:
        # Without a rank, queries are projected directly.
        return Latent(
            query_rank=self.count("q_lora_rank", least=0) if "q_lora_rank" in self.record else 0,
            **{size: self.count(key) for size, key in _LATENT.items()},
        )

    def experts(self, keys: ExpertKeys, layers: int) -> Experts:
        width = self.count(*keys.width)
        shared = self.count(keys.shared, least=0) * width if keys.shared else 0
        if keys.shared_width:
            shared = self.count(keys.shared_width)
        count, active = self.count(*keys.count), self.count(*keys.active)
        if active > count:
            problem = f"{active} active experts of {count}"
            self.problems.append(Violation(f"{self.where}: {keys.active[0]}", problem, str(count)))
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
            dense=self._dense(keys, layers),
        )

    def _dense(self, keys: ExpertKeys, layers: int) -> tuple[int, ...]:
        kinds = self._list("mlp_layer_types", layers)
        if kinds is not None:
            return tuple(index for index, kind in enumerate(kinds) if kind == "dense")
        first = self.count(keys.first_dense, least=0) if keys.first_dense else 0
        step = self.count(keys.step) if keys.step and keys.step in self.record else 1
        named = self.record.get(keys.dense_blocks) if keys.dense_blocks else None
        dense = {*range(min(first, layers)), *(index for index in range(layers) if (index + 1) % step)}
        if isinstance(named, list):
            dense |= {index for index in named if isinstance(index, int) and index < layers}
        return tuple(sorted(dense))

    def windows(self, row: DecoderRow, layers: int) -> tuple[int, ...]:
        """Return the attention window of every block; empty if no block has one."""
        kinds = self._list("layer_types", layers)
        others = [kind for kind in kinds or () if kind not in _KINDS_OF_LAYERS]
        if others:
            problem = f"{shown(others[0])} is not supported"
            self.problems.append(Violation(f"{self.where}: layer_types", problem, _KINDS_OF_LAYERS[0]))
        if row.window is None or self.record.get(row.window) in (None, 0):
            return ()
        if row.window_switch and not self.record.get(row.window_switch, False):
            return ()
        window = self.count(row.window)
        found = tuple(window if self._slides(row, index, kinds) else 0 for index in range(layers))
        return found if any(found) else ()

    def _slides(self, row: DecoderRow, index: int, kinds: list[Any] | None) -> bool:
        if kinds is not None:
            return bool(kinds[index] == "sliding_attention")
        if row.first_window:
            return index >= self.count(row.first_window, least=0)
        if row.full_every:
            return index % row.full_every != (0 if row.full_first else row.full_every - 1)
        return True

    def _list(self, key: str, layers: int) -> list[Any] | None:
        value = self.record.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != layers:
            problem = f"{shown(value)}: must be a list with an entry for each of {layers} layers"
            self.problems.append(Violation(f"{self.where}: {key}", problem))
            return None
        return value
