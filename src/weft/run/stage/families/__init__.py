"""Families of models that can be cut into stages, one file each."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from weft.run.stage.stage_module import StageModule

# By the family's name, where its stages are. A run needs one of them, and each brings its part of
# `transformers` along, whose imports take about a second.
STAGE_FAMILIES: Mapping[str, str] = {
    "gpt": "weft.run.stage.families.gpt:GptStage",
    "llama": "weft.run.stage.families.llama:LlamaStage",
    "bert": "weft.run.stage.families.bert:BertStage",
    "vit": "weft.run.stage.families.vit:ViTStage",
    "resnet": "weft.run.stage.families.resnet:ResNetStage",
    "vgg": "weft.run.stage.families.vgg:VggStage",
    "alexnet": "weft.run.stage.families.alexnet:AlexNetStage",
}


def stage_family(name: str) -> type[StageModule]:
    """Return the stages of a known family; makes one of a `ModelConfig` and the positions of its layers."""
    module, _, stage = STAGE_FAMILIES[name].partition(":")
    family: type[StageModule] = getattr(import_module(module), stage)
    return family
