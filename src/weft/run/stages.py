"""`build_stage`: the layers a plan gives to one stage, as a module with initial values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.describe.families.own import FAMILY
from weft.describe.model import ModelConfig
from weft.errors import InputError, Violation, require_choice
from weft.run.families import STAGE_FAMILIES
from weft.run.families.own import OwnStage
from weft.run.stage_module import StageModule, materialise


def build_stage(
    model_config: ModelConfig, layers: Sequence[int], seed: int, dtype: torch.dtype
) -> StageModule | OwnStage:
    """A stage of a model of a known family, or of one's own, in host memory.

    Args:
        layers: positions in the family's LayerGraph, rising without a gap: 0 is the embedding, 1 to n are the
            blocks, n + 1 is the final norm with the head.
        seed, dtype: every parameter is drawn in fp32, keyed by (seed, its name in `transformers`), then cast,
            so that any cut has the same values.

    Raises:
        InputError: for an unknown family, or layers that do not exist or do not follow each other.
    """
    if model_config.family == FAMILY:
        _require_layers(model_config, layers)
        return OwnStage(model_config, layers, seed, dtype)
    require_choice(f"model {model_config.name}", model_config.family, STAGE_FAMILIES)
    _require_layers(model_config, layers)
    with torch.device("meta"):
        stage = STAGE_FAMILIES[model_config.family](model_config, layers)
    materialise(stage, seed, dtype)
    return stage


def _require_layers(config: ModelConfig, layers: Sequence[int]) -> None:
    where = f"model {config.name}"
    count = config.layers + 2
    problems = []
    if not layers or not 0 <= min(layers) <= max(layers) < count:
        problems.append(
            Violation(where, f"stage layers {list(layers)} must be at least one of 0 to {count - 1}")
        )
    elif list(layers) != list(range(layers[0], layers[0] + len(layers))):
        whole = str(list(range(min(layers), max(layers) + 1)))
        problems.append(Violation(where, f"stage layers {list(layers)} must follow each other", whole))
    if problems:
        raise InputError(problems)
