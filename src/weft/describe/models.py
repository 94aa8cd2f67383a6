"""Models by name: weft's presets, Hugging Face's `config.json` files, and files of layer graphs."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weft.describe.clip_config import CLIP, read_clip
from weft.describe.convolutional_models import RESNET, convolutional_config, read_resnet
from weft.describe.decoder_config import read_decoder
from weft.describe.decoder_row import ROWS, own_row
from weft.describe.families import captured
from weft.describe.families.own import FAMILY, own_config
from weft.describe.graph_models import encoder_decoder_config, image_text_config, tower_config
from weft.describe.hub_sizes import head_problems, read_sizes, tied_problems
from weft.describe.model import ModelConfig, image_tokens, read_constants
from weft.describe.reading import read_json
from weft.describe.t5_config import T5, read_t5
from weft.describe.toml_table import is_importable
from weft.describe.units import shown
from weft.errors import InputError, Violation, nearest

CONFIG_FILE = "config.json"
# Tokens per sample in most pretraining. Models accept longer texts than most of their training has.
USUAL_SEQUENCE = 4096


def _preset(name: str, record: Mapping[str, Any]) -> ModelConfig:
    sizes = {key: value for key, value in record.items() if key != "source"}
    if "config" in sizes:
        config = read_decoder(sizes["config"], ROWS[sizes["config"]["model_type"]], name, name)
        return replace(config, sequence=min(config.sequence, USUAL_SEQUENCE))
    if "widths" in sizes:
        return convolutional_config(name, **sizes)
    if "image_layers" in sizes:
        return image_text_config(name, **sizes)
    if "depth" in sizes:
        return tower_config(name, **sizes)
    if "encoder_layers" in sizes:
        return encoder_decoder_config(name, **sizes)
    sizes.setdefault("key_value_heads", sizes["heads"])
    sizes.setdefault("feed_forward", 4 * sizes["hidden"])
    if "image_size" in sizes:
        sizes["sequence"] = image_tokens(sizes["image_size"], sizes["patch_size"])
    return ModelConfig(name=name, **sizes)


_RECORDS = tomllib.loads(files("weft.describe").joinpath("presets.toml").read_text(encoding="utf-8"))
# The models that weft knows by name, in the order of `presets.toml`.
PRESETS = MappingProxyType({name: _preset(name, record) for name, record in _RECORDS.items()})


def resolve_model(name_or_path: str, *, sequence: int | None = None) -> ModelConfig:
    """Return the sizes of a model.

    The name is a preset, a folder with a `config.json`, or the path of such a file. It may also be the path
    of a layer graph. Names of the form `package.module:function` are of user-defined models. `sequence`
    replaces the default: the longest sequence, of a decoder's `config.json` at most `USUAL_SEQUENCE`. A
    `config.json` with learned positions accepts no longer sequence than its own; a preset accepts any. Images
    have one token per patch and the class token, and no other sequence.

    Raises:
        InputError: for an unknown preset, with the nearest name; for a missing file; for a `config.json` of
            another family, or with missing, invalid or unsupported keys, with all of them.
    """
    if sequence is not None and (isinstance(sequence, bool) or sequence < 1):
        raise InputError(Violation("sequence", f"{shown(sequence)}: at least 1 token is needed", "1"))
    if name_or_path in PRESETS:
        config = PRESETS[name_or_path]
    elif is_importable(name_or_path):
        config = own_config(name_or_path)
    else:
        config = read_config(_config_path(name_or_path))
        if config.family in ("gpt", "bert") and sequence is not None and sequence > config.sequence:
            problem = f"{sequence} tokens, but {name_or_path} has {config.sequence} learned positions"
            raise InputError(Violation("sequence", problem, str(config.sequence)))
        if config.decoder is not None and sequence is None:
            sequence = min(config.sequence, USUAL_SEQUENCE)
    fixed = not config.reads_tokens or config.family in (FAMILY, captured.FAMILY)
    if fixed and sequence not in (None, config.sequence):
        what = "is made for samples"
        if config.reads_images:
            what = "reads images" if config.image_text is None else "reads texts"
        problem = f"{sequence} tokens, but {name_or_path} {what} of {config.sequence}"
        raise InputError(Violation("sequence", problem, str(config.sequence)))
    return config if sequence is None else replace(config, sequence=sequence)


def read_config(path: Path) -> ModelConfig:
    """Read the sizes in a `config.json`, whose model gets its folder's name, or in a layer graph.

    Raises:
        InputError: with all mistakes of the file.
    """
    record = read_json(path)
    if not isinstance(record, dict):
        raise InputError(Violation(str(path), "a model configuration is a JSON object"))
    if captured.is_layer_graph(record):
        return captured.captured_config(path)
    model_type = record.get("model_type")
    if not isinstance(model_type, str):
        problem = (
            "missing; a model's config.json has it"
            if model_type is None
            else f"{shown(model_type)}: must be a text"
        )
        raise InputError(Violation(f"{path}: model_type", problem))
    name = path.resolve().parent.name if path.name == CONFIG_FILE else path.stem
    if model_type == RESNET:
        return read_resnet(record, name, str(path))
    if model_type == CLIP:
        return read_clip(record, name, str(path))
    if model_type == T5:
        return read_t5(record, name, str(path))
    if model_type in _FORMATS:
        return _from_record(record, _FORMATS[model_type], name, str(path))
    row = ROWS[model_type] if model_type in ROWS else own_row(record, str(path))
    return read_decoder(record, row, name, str(path))


@dataclass(frozen=True, slots=True)
class _Format:
    """The keys of one model type's sizes.

    `optional` sizes may be absent or null. `tied` is the default of `tie_word_embeddings`. `unsupported` maps
    keys to the only supported values (also absent or null), which the family's layers implement. Models of
    `images` have sizes of image, patch and labels instead of sequence and vocabulary.
    """

    family: str
    required: Mapping[str, str]
    optional: Mapping[str, str]
    tied: bool
    unsupported: Mapping[str, object]
    images: bool = False

    @property
    def keys(self) -> dict[str, str]:
        return {**self.required, **self.optional}


_TRANSFORMER = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
}
_TEXT = {**_TRANSFORMER, "vocabulary": "vocab_size", "sequence": "max_position_embeddings"}

_FORMATS: Mapping[str, _Format] = {
    "gpt2": _Format(
        family="gpt",
        required={
            "layers": "n_layer",
            "hidden": "n_embd",
            "heads": "n_head",
            "vocabulary": "vocab_size",
            "sequence": "n_positions",
        },
        optional={"feed_forward": "n_inner"},
        tied=True,
        unsupported={"add_cross_attention": False, "sliding_window": None},
    ),
    "bert": _Format(
        family="bert",
        required=_TEXT,
        optional={},
        tied=True,
        unsupported={
            "hidden_act": "gelu",
            "type_vocab_size": 2,
            "position_embedding_type": "absolute",
            "is_decoder": False,
        },
    ),
    "vit": _Format(
        family="vit",
        required={**_TRANSFORMER, "image_size": "image_size", "patch_size": "patch_size"},
        optional={"channels": "num_channels"},
        tied=False,
        unsupported={"hidden_act": "gelu", "qkv_bias": True},
        images=True,
    ),
}

# Defaults of `num_channels` and of the labels in `transformers`.
_CHANNELS = 3
_LABELS = 2


def _config_path(name_or_path: str) -> Path:
    path = Path(name_or_path)
    try:
        if path.is_dir():
            return path / CONFIG_FILE
        if path.is_file():
            return path
    except (OSError, ValueError):
        pass  # too long or malformed for a path, so it is a wrong name
    known = PRESETS
    problem = f"{shown(name_or_path)} is neither a preset ({', '.join(known)}) nor a folder or {CONFIG_FILE}"
    raise InputError(Violation("model", problem, nearest(name_or_path.lower(), known)))


def _from_record(record: Mapping[str, Any], form: _Format, name: str, where: str) -> ModelConfig:
    sizes, problems = read_sizes(record, form.required, form.optional, where)
    problems += tied_problems(record, where)
    for key, supported in form.unsupported.items():
        if record.get(key) not in (None, supported):
            problem = f"{shown(record[key])} is not supported"
            near = "null" if supported is None else str(supported).lower()
            problems.append(Violation(f"{where}: {key}", problem, near))
    constants, wrong = read_constants(record, form.family, where)
    problems += wrong
    problems += head_problems(sizes, form.keys, where)
    if form.images:
        problems += _image_problems(sizes, record, where)
    if problems:
        raise InputError(problems)
    tied = record.get("tie_word_embeddings")
    sizes.setdefault("key_value_heads", sizes["heads"])
    sizes.setdefault("feed_forward", 4 * sizes["hidden"])
    if form.images:
        sizes.setdefault("channels", _CHANNELS)
        sizes["vocabulary"] = len(record.get("id2label") or range(_LABELS))
        sizes["sequence"] = image_tokens(sizes["image_size"], sizes["patch_size"])
        tied = False
    return ModelConfig(
        name=name,
        family=form.family,
        tied_embeddings=form.tied if tied is None else tied,
        norm_epsilon=constants.get("norm_epsilon"),
        record=json.dumps(record, sort_keys=True),
        **sizes,
    )


def _image_problems(sizes: Mapping[str, int], record: Mapping[str, Any], where: str) -> list[Violation]:
    problems = []
    image, patch = sizes.get("image_size"), sizes.get("patch_size")
    if image is not None and patch is not None and image % patch:
        near = str(max(1, round(image / patch)) * patch)
        problems.append(
            Violation(f"{where}: image_size", f"{image} is not divisible by patch_size = {patch}", near)
        )
    labels = record.get("id2label")
    if labels is not None and not isinstance(labels, dict):
        problems.append(Violation(f"{where}: id2label", f"{shown(labels)}: must be an object"))
    return problems
