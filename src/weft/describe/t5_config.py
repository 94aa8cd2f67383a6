"""Sizes in the `config.json` of a T5 (Raffel et al., arXiv 1910.10683), of both versions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from weft.describe.graph_models import encoder_decoder_config
from weft.describe.hub_sizes import read_sizes, tied_problems
from weft.describe.model import ModelConfig
from weft.describe.units import shown
from weft.errors import InputError, Violation

T5 = "t5"
# Keys by the names of sizes; those that a file may lack have defaults.
_REQUIRED = {
    "hidden": "d_model",
    "head_size": "d_kv",
    "feed_forward": "d_ff",
    "encoder_layers": "num_layers",
    "heads": "num_heads",
    "vocabulary": "vocab_size",
}
_OPTIONAL = {
    "decoder_layers": "num_decoder_layers",
    "position_buckets": "relative_attention_num_buckets",
    "sequence": "n_positions",
}
_BUCKETS = 32
# Relative positions fit any length; most pretraining of T5 has this one.
_SEQUENCE = 512
# By value of `feed_forward_proj`: whether the activation is a rectifier, and whether a gate multiplies it.
_FEED_FORWARDS = {"relu": (True, False), "gated-gelu": (False, True)}


def read_t5(record: Mapping[str, Any], name: str, where: str) -> ModelConfig:
    """Read the sizes in the `config.json` of a `transformers.T5ForConditionalGeneration`.

    Raises:
        InputError: with all mistakes of the record.
    """
    sizes, problems = read_sizes(record, _REQUIRED, _OPTIONAL, where)
    problems += tied_problems(record, where)
    feed_forward = record.get("feed_forward_proj") or "relu"
    if feed_forward not in _FEED_FORWARDS:
        problem = f"{shown(feed_forward)} is not one of {', '.join(_FEED_FORWARDS)}"
        problems.append(Violation(f"{where}: feed_forward_proj", problem, "relu"))
    if record.get("is_encoder_decoder") not in (None, True):
        problem = f"{shown(record['is_encoder_decoder'])} is not supported"
        problems.append(Violation(f"{where}: is_encoder_decoder", problem, "true"))
    if problems:
        raise InputError(problems)
    rectified, gated = _FEED_FORWARDS[feed_forward]
    defaults = {
        "decoder_layers": sizes["encoder_layers"],
        "position_buckets": _BUCKETS,
        "sequence": _SEQUENCE,
    }
    return encoder_decoder_config(
        name,
        family=T5,
        **{**defaults, **sizes},
        # `transformers` ties them, also where `tie_word_embeddings` is false.
        tied_embeddings=True,
        norm="rms",
        biases=False,
        rectified=rectified,
        gated=gated,
        record=json.dumps(record, sort_keys=True),
    )
