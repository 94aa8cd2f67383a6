"""Families of models that can be cut into stages, one file each."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from weft.describe.decoder_row import TRAINED
from weft.run.stage.stage_module import StageModule

# The modules and classes of stages by family. A run imports only one: each imports its part of
# `transformers`, which takes about a second.
STAGE_FAMILIES: Mapping[str, str] = {
    "gpt": "weft.run.stage.families.gpt:GptStage",
    "bert": "weft.run.stage.families.bert:BertStage",
    "vit": "weft.run.stage.families.vit:ViTStage",
    "resnet": "weft.run.stage.families.resnet:ResNetStage",
    "vgg": "weft.run.stage.families.vgg:VggStage",
    "alexnet": "weft.run.stage.families.alexnet:AlexNetStage",
    "multimodal-transformer": "weft.run.stage.families.multimodal:MultimodalStage",
    "encoder-decoder": "weft.run.stage.families.encoder_decoder:EncoderDecoderStage",
    "image-text": "weft.run.stage.families.image_text:ImageTextStage",
    "dlrm": "weft.run.stage.families.feature_towers:FeatureTowerStage",
    "candle-uno": "weft.run.stage.families.feature_towers:FeatureTowerStage",
    **dict.fromkeys(TRAINED, "weft.run.stage.families.decoder:DecoderStage"),
}


def stage_family(name: str) -> type[StageModule]:
    """Return the stage class of a known family; it takes a `ModelConfig` and positions of layers."""
    module, _, stage = STAGE_FAMILIES[name].partition(":")
    family: type[StageModule] = getattr(import_module(module), stage)
    family.load(name)
    return family
