"""`ModelConfig`: the sizes of a model of a known family, from a preset, a run file or a `config.json`.

The planner reads the `LayerGraph` built from it, the runtime builds the real `transformers` class from it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of a decoder of family `gpt` (GPT-2) or `llama`.

    `sequence` is the longest sequence the model accepts, and the default one.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    feed_forward: int
    vocabulary: int
    sequence: int
    tied_embeddings: bool = False
