"""Which model is meant: a preset by name, or a Hugging Face `config.json`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from weft.describe.model import ModelConfig
from weft.errors import InputError, Violation, nearest

SIZES = (
    "layers",
    "hidden",
    "heads",
    "key_value_heads",
    "feed_forward",
    "vocabulary",
    "sequence",
)

# Our names to the keys of `config.json`, and what transformers takes for a missing `tie_word_embeddings`.
CONFIG_KEYS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "layers": "n_layer",
        "hidden": "n_embd",
        "heads": "n_head",
        "vocabulary": "vocab_size",
        "sequence": "n_positions",
    },
    "llama": {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "key_value_heads": "num_key_value_heads",
        "feed_forward": "intermediate_size",
        "vocabulary": "vocab_size",
        "sequence": "max_position_embeddings",
    },
}
FAMILY_OF_TYPE: Mapping[str, str] = {"gpt2": "gpt", "llama": "llama"}
TIED_BY_DEFAULT: Mapping[str, bool] = {"gpt2": True, "llama": False}


@cache
def presets() -> Mapping[str, ModelConfig]:
    """All presets by name, in the order of the package's `presets.toml`."""
    tables = tomllib.loads(files("weft.describe").joinpath("presets.toml").read_text())
    return {name: _from_sizes(name, table) for name, table in tables.items()}


def resolve_model(name_or_path: str, *, sequence: int | None = None) -> ModelConfig:
    """The model of that name, or of a `config.json` (or the folder that holds one).

    Args:
        sequence: tokens per sample, at most the model's longest; default: the longest.

    Raises:
        InputError: listing everything that is wrong, with the nearest preset for an unknown name.
    """
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        config = read_config_json(path)
    elif name_or_path in presets():
        config = presets()[name_or_path]
    else:
        known = ", ".join(presets())
        raise InputError(
            Violation(
                "model",
                f"{name_or_path!r} is neither a preset ({known}) nor a config.json or a folder with one",
                nearest(name_or_path, presets()),
            )
        )
    if sequence is None:
        return config
    if not 1 <= sequence <= config.sequence:
        raise InputError(
            Violation(
                "sequence", f"{sequence}; {config.name} takes 1 to {config.sequence}", str(config.sequence)
            )
        )
    return replace(config, sequence=sequence)


def read_config_json(path: Path) -> ModelConfig:
    """The sizes that a Hugging Face `config.json` of type gpt2 or llama gives.

    Raises:
        InputError: when the file cannot be read, the type is another one, or sizes are missing or illegal.
    """
    where = str(path)
    try:
        record = json.loads(path.read_text())
    except OSError as error:
        raise InputError(Violation(where, error.strerror or str(error))) from None
    except (ValueError, RecursionError) as error:
        raise InputError(Violation(where, f"not JSON: {error}")) from None
    if not isinstance(record, dict):
        raise InputError(Violation(where, "must hold one JSON object"))
    kind = record.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_KEYS:
        allowed = ", ".join(CONFIG_KEYS)
        raise InputError(
            Violation(where, f"model_type {kind!r} is not one of {allowed}", nearest(str(kind), CONFIG_KEYS))
        )
    sizes: dict[str, Any] = {"family": FAMILY_OF_TYPE[kind]}
    optional = {"key_value_heads"}
    problems = []
    for ours, theirs in CONFIG_KEYS[kind].items():
        if record.get(theirs) is not None:
            sizes[ours] = record[theirs]
        elif ours not in optional:
            problems.append(Violation(where, f"{theirs} is missing"))
    if kind == "gpt2" and record.get("n_inner") is not None:
        sizes["feed_forward"] = record["n_inner"]
    sizes["tied_embeddings"] = record.get("tie_word_embeddings", TIED_BY_DEFAULT[kind])
    if problems:
        raise InputError(problems)
    name = record.get("_name_or_path") or path.resolve().parent.name
    return _from_sizes(str(name), sizes, where)


def _from_sizes(name: str, sizes: Mapping[str, Any], where: str = "") -> ModelConfig:
    filled = dict(sizes)
    filled.setdefault("key_value_heads", filled.get("heads"))
    if "feed_forward" not in filled and isinstance(filled.get("hidden"), int):
        filled["feed_forward"] = 4 * filled["hidden"]
    where = where or f"model {name}"
    problems = [
        Violation(where, f"{key} = {filled.get(key)!r} must be a whole number of at least 1")
        for key in SIZES
        if not isinstance(filled.get(key), int) or isinstance(filled.get(key), bool) or filled[key] < 1
    ]
    if not isinstance(filled.get("tied_embeddings", False), bool):
        problems.append(Violation(where, "tie_word_embeddings must be true or false"))
    if problems:
        raise InputError(problems)
    config = ModelConfig(name=name, **filled)
    problems = config_problems(config, where)
    if problems:
        raise InputError(problems)
    return config


def config_problems(config: ModelConfig, where: str) -> list[Violation]:
    """What is wrong with sizes that are whole numbers each by itself."""
    problems = []
    if config.hidden % config.heads:
        near = max(1, round(config.hidden / config.heads)) * config.heads
        problems.append(
            Violation(where, f"hidden {config.hidden} is not a multiple of {config.heads} heads", str(near))
        )
    if config.heads % config.key_value_heads:
        divisors = [n for n in range(1, config.heads + 1) if config.heads % n == 0]
        near = min(divisors, key=lambda n: abs(n - config.key_value_heads))
        problems.append(
            Violation(
                where,
                f"{config.heads} heads are not a multiple of {config.key_value_heads} key-value heads",
                str(near),
            )
        )
    if config.family == "llama" and config.hidden % config.heads == 0 and (config.hidden // config.heads) % 2:
        problems.append(
            Violation(
                where, f"heads of {config.hidden // config.heads} elements cannot be rotated; must be even"
            )
        )
    return problems
