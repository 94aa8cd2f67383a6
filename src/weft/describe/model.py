"""`ModelConfig`: the sizes of a model of a known family, from a preset, a run file or a `config.json`.

The planner reads the `LayerGraph` built from it, the runtime builds the real `transformers` class from it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of a transformer of family `gpt` (GPT-2), `llama`, `bert` or `vit`.

    `sequence` is the longest sequence the model accepts, and the default one. A model of images reads
    `channels` x `image_size` x `image_size` pixels in patches of `patch_size` squared; its sequence is fixed,
    its `vocabulary` are the classes. The three are 0 for a model of text.
    `norm_epsilon` and `rotary_base` are None where the family's own hold.
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
    norm_epsilon: float | None = None
    rotary_base: float | None = None
    image_size: int = 0
    patch_size: int = 0
    channels: int = 0

    @property
    def reads_images(self) -> bool:
        return self.image_size > 0


def image_tokens(image_size: int, patch_size: int) -> int:
    """Tokens of an image: its patches and the class token."""
    return (image_size // patch_size) ** 2 + 1
