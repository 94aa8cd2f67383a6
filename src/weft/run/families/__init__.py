"""Families of models that can be cut into stages, one file each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from weft.describe.model import ModelConfig
from weft.run.families.bert import BertStage
from weft.run.families.gpt import GptStage
from weft.run.families.llama import LlamaStage
from weft.run.families.vit import ViTStage
from weft.run.stage_module import StageModule

STAGE_FAMILIES: Mapping[str, Callable[[ModelConfig, Sequence[int]], StageModule]] = {
    "gpt": GptStage,
    "llama": LlamaStage,
    "bert": BertStage,
    "vit": ViTStage,
}
