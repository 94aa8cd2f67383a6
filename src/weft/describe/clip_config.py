"""Sizes in the `config.json` of a CLIP (Radford et al., arXiv 2103.00020)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from weft.describe.graph_models import image_text_config
from weft.describe.hub_sizes import head_problems, read_sizes
from weft.describe.model import ModelConfig
from weft.describe.units import shown
from weft.errors import InputError, Violation

CLIP = "clip"
_BLOCKS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
}
_TEXT = {**_BLOCKS, "vocabulary": "vocab_size", "sequence": "max_position_embeddings"}
_IMAGE = {**_BLOCKS, "image_size": "image_size", "patch_size": "patch_size", "channels": "num_channels"}
# Defaults of absent keys in `transformers`.
_TEXT_DEFAULTS: Mapping[str, Any] = {
    "num_hidden_layers": 12,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "vocab_size": 49408,
    "max_position_embeddings": 77,
}
_IMAGE_DEFAULTS: Mapping[str, Any] = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "image_size": 224,
    "patch_size": 32,
    "num_channels": 3,
}
_PROJECTION = 512
# The activations, and whether each is the quick one.
_ACTIVATIONS = {"quick_gelu": True, "gelu": False}


def read_clip(record: Mapping[str, Any], name: str, where: str) -> ModelConfig:
    """Read the sizes in the `config.json` of a `transformers.CLIPModel`.

    Raises:
        InputError: with all mistakes of the record.
    """
    text, problems = _side(record, "text_config", _TEXT, _TEXT_DEFAULTS, where)
    image, wrong = _side(record, "vision_config", _IMAGE, _IMAGE_DEFAULTS, where)
    space, more = read_sizes(
        {"projection_dim": _PROJECTION, **record}, {"projection": "projection_dim"}, {}, where
    )
    problems += wrong + more
    quick = {side.pop("quick", True) for side in (text, image)}
    if len(quick) > 1:
        problems.append(
            Violation(f"{where}: hidden_act", "both towers need the same activation", "quick_gelu")
        )
    size, patch = image.get("image_size"), image.get("patch_size")
    if size is not None and patch is not None and size % patch:
        problem = f"{size} is not divisible by patch_size = {patch}"
        near = str(max(1, round(size / patch)) * patch)
        problems.append(Violation(f"{where}: vision_config.image_size", problem, near))
    if problems:
        raise InputError(problems)
    return image_text_config(
        name,
        family=CLIP,
        **{key: value for key, value in image.items() if key != "layers"},
        vocabulary=text["vocabulary"],
        sequence=text["sequence"],
        image_layers=image["layers"],
        text_layers=text["layers"],
        text_hidden=text["hidden"],
        text_heads=text["heads"],
        text_feed_forward=text["feed_forward"],
        projection=space["projection"],
        quick=quick.pop(),
        record=json.dumps(record, sort_keys=True),
    )


def _side(
    record: Mapping[str, Any], key: str, keys: Mapping[str, str], defaults: Mapping[str, Any], where: str
) -> tuple[dict[str, Any], list[Violation]]:
    """Return one tower's sizes, and whether its activation is the quick one."""
    given = record.get(key) or {}
    if not isinstance(given, Mapping):
        return {}, [Violation(f"{where}: {key}", f"{shown(given)}: must be an object")]
    sizes, problems = read_sizes({**defaults, **given}, keys, {}, f"{where}: {key}")
    problems += head_problems(sizes, keys, f"{where}: {key}")
    activation = given.get("hidden_act") or "quick_gelu"
    if activation not in _ACTIVATIONS:
        problem = f"{shown(activation)} is not one of {', '.join(_ACTIVATIONS)}"
        problems.append(Violation(f"{where}: {key}.hidden_act", problem, "quick_gelu"))
    return {**sizes, "quick": _ACTIVATIONS.get(activation, True)}, problems
