"""Sizes of convolutional networks: from a preset, or from the `config.json` of a residual network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.describe.model import Convolutions, ModelConfig
from weft.describe.units import shown
from weft.errors import InputError, Violation

# The model type of residual networks in a `config.json`.
RESNET = "resnet"
# Defaults of absent keys in `transformers`, which has no key for an image size.
_DEFAULTS: Mapping[str, Any] = {
    "embedding_size": 64,
    "hidden_sizes": [256, 512, 1024, 2048],
    "depths": [3, 4, 6, 3],
    "num_channels": 3,
    "layer_type": "bottleneck",
    "image_size": 224,
}
_LABELS = 2
_SUPPORTED: Mapping[str, object] = {
    "hidden_act": "relu",
    "downsample_in_first_stage": False,
    "downsample_in_bottleneck": False,
}
_LAYER_TYPES = ("basic", "bottleneck")
# Linear layers after the convolutions of VGG and AlexNet.
_LINEAR_LAYERS = 3
_LARGEST_SIZE = 10**6


def convolutional_config(
    name: str,
    *,
    family: str,
    image_size: int,
    channels: int,
    vocabulary: int,
    widths: Sequence[int],
    depths: Sequence[int] = (),
    hidden: int = 0,
    feed_forward: int = 0,
    **rest: Any,
) -> ModelConfig:
    """Build a `resnet`, `vgg` or `alexnet`; `rest` are further fields of `Convolutions`."""
    inner = sum(depths) if family == RESNET else (sum(depths) or len(widths)) + _LINEAR_LAYERS - 2
    return ModelConfig(
        name=name,
        family=family,
        layers=inner,
        hidden=hidden,
        heads=0,
        key_value_heads=0,
        feed_forward=feed_forward,
        vocabulary=vocabulary,
        sequence=1,
        image_size=image_size,
        channels=channels,
        convolutions=Convolutions(widths=tuple(widths), depths=tuple(depths), **rest),
    )


def read_resnet(record: Mapping[str, Any], name: str, where: str) -> ModelConfig:
    """Read the sizes in the `config.json` of a `transformers.ResNetForImageClassification`.

    Images have 224 x 224 pixels if the file has no `image_size`.

    Raises:
        InputError: with all mistakes of the record.
    """
    given = {key: value for key, value in record.items() if value is not None}
    values = {**_DEFAULTS, **given}
    problems = [
        Violation(f"{where}: {key}", f"{shown(values[key])}: must be an integer of at least 1")
        for key in ("embedding_size", "num_channels", "image_size")
        if not _is_size(values[key])
    ]
    lists = ("hidden_sizes", "depths")
    problems += [
        Violation(f"{where}: {key}", f"{shown(values[key])}: must be integers of at least 1")
        for key in lists
        if not isinstance(values[key], list) or not values[key] or not all(map(_is_size, values[key]))
    ]
    if not problems and len(values["hidden_sizes"]) != len(values["depths"]):
        counts = " and ".join(f"{len(values[key])} {key}" for key in lists)
        problems.append(Violation(f"{where}: depths", f"{counts} are given; as many of each are needed"))
    if values["layer_type"] not in _LAYER_TYPES:
        problem = f"{shown(values['layer_type'])} is not one of {', '.join(_LAYER_TYPES)}"
        problems.append(Violation(f"{where}: layer_type", problem, "basic"))
    problems += [
        Violation(f"{where}: {key}", f"{shown(given[key])} is not supported", str(supported).lower())
        for key, supported in _SUPPORTED.items()
        if given.get(key, supported) != supported
    ]
    labels = given.get("id2label", {str(number): "" for number in range(_LABELS)})
    if not isinstance(labels, dict):
        problems.append(Violation(f"{where}: id2label", f"{shown(labels)}: must be an object"))
    if problems:
        raise InputError(problems)
    return convolutional_config(
        name,
        family=RESNET,
        image_size=values["image_size"],
        channels=values["num_channels"],
        vocabulary=len(labels),
        widths=values["hidden_sizes"],
        depths=values["depths"],
        hidden=values["embedding_size"],
        bottleneck=values["layer_type"] == "bottleneck",
    )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _LARGEST_SIZE
