"""`ModelConfig`: the sizes of a model of a known family, from a preset, a run file or a `config.json`.

The planner reads a `LayerGraph` built from it; the runtime builds the real `transformers` class from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.describe.decoder import Decoder, decoder_from
from weft.describe.one_line import one_line
from weft.describe.units import counted, shown
from weft.errors import Violation


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolutions:
    """Sizes of a convolutional network.

    Attributes:
        widths: channels of every group of layers; for AlexNet, of every convolution.
        depths: layers of every group; empty for AlexNet.
        bottleneck: True if a residual block narrows its channels to a quarter inside.
        pooled_size: the size of maps after the average before the first fully connected layer.
        dropout: probability that a fully connected layer drops an element in training.
    """

    widths: tuple[int, ...]
    depths: tuple[int, ...] = ()
    bottleneck: bool = False
    pooled_size: int = 1
    dropout: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Towers:
    """Sizes of a model of towers: branches side by side, each with its own input, and a joint end.

    A sample has one tensor for each tower, in this order: token numbers, vectors, rows of tables.

    Attributes:
        depth: layers of each tower of blocks or of linear layers.
        tokens: of each tower of blocks, the number of tokens that it tells apart.
        features: of each tower of linear layers, the size of the vector that it reads.
        tables: of each tower that is a table, its rows.
        looked_up: rows of each table that a sample looks up and adds up.
        joint_depth: linear layers behind the towers, before the output.
    """

    depth: int
    tokens: tuple[int, ...] = ()
    features: tuple[int, ...] = ()
    tables: tuple[int, ...] = ()
    looked_up: int = 0
    joint_depth: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoder:
    """Sizes of a transformer with an encoder and a decoder that attends to its output.

    A sample has two inputs: the encoder's tokens and the decoder's.

    Attributes:
        encoder_layers, decoder_layers: the blocks of each side.
        head_size: the size of a head of attention.
        norm: the norm's name in `weft.describe.families.block_parts.NORMS`.
        biases: True if products have biases.
        rectified: True if the activation is a rectifier.
        gated: True if a gate multiplies the feed-forward's activation.
        position_buckets: those of relative positions; 0 for learned positions.
    """

    encoder_layers: int
    decoder_layers: int
    head_size: int
    norm: str = "layer"
    biases: bool = True
    rectified: bool = False
    gated: bool = False
    position_buckets: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageText:
    """Sizes of a tower of images beside a tower of texts, both projected to one space.

    The vocabulary and the sequence of the model are those of texts.

    Attributes:
        image_layers: blocks of the image tower; its other sizes are the model's own.
        text_layers, text_hidden, text_heads, text_feed_forward: the text tower's.
        projection: the size of the common space.
        quick: True for the activation x sigmoid(1.702 x), which keeps one more tensor than the exact one.
        matching: True if texts are read both ways and the head tells whether image and text belong together;
            False for causal texts and CLIP's contrastive head.
    """

    image_layers: int
    text_layers: int
    text_hidden: int
    text_heads: int
    text_feed_forward: int
    projection: int
    quick: bool = True
    matching: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of a transformer of family `gpt` (GPT-2), `bert` or `vit`, a decoder, or a convolutional network.

    The family of another decoder than GPT-2 is its `model_type` in `transformers`, such as `llama`.
    `decoder` is its architecture; None for that of a Llama with these sizes.
    `record` is the text of the `config.json` that the model is from; empty for other models.

    `sequence` is the longest sequence that the model accepts, and the default. A model of images reads
    `channels` x `image_size` x `image_size` pixels in patches of `patch_size` squared. Its sequence is fixed,
    and its `vocabulary` is the number of classes. The three sizes are 0 for a model of text.
    `norm_epsilon` and `rotary_base` are None for the family's own values.
    `convolutions` is None for a transformer. A convolutional network (`resnet`, `vgg`, `alexnet`) has no
    heads and a sequence of 1. Its `hidden` are the channels of a first layer outside the groups.
    `feed_forward` is the width of its fully connected layers; `layers` omits the first and the last layer.
    `towers`, `encoder_decoder` and `image_text` are None for a chain; `layers` omits the first and the last
    layer of other graphs. In a model of towers, `hidden` is the width of blocks or of table rows, and
    `vocabulary` counts outputs.
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
    convolutions: Convolutions | None = None
    towers: Towers | None = None
    encoder_decoder: EncoderDecoder | None = None
    image_text: ImageText | None = None
    decoder: Decoder | None = None
    record: str = ""

    def __repr__(self) -> str:
        sizes = f"{counted(self.layers, 'layer')}, hidden {self.hidden}, vocabulary {self.vocabulary}"
        return one_line(self, f"{self.name}: {self.family}, {sizes}, sequence {self.sequence}")

    @property
    def architecture(self) -> Decoder:
        """The decoder of a model of text; a Llama's unless the model states another one."""
        return self.decoder or Decoder(head_size=self.hidden // self.heads)

    @property
    def reads_images(self) -> bool:
        return self.image_size > 0

    @property
    def is_graph(self) -> bool:
        """True if the layers of the model, of a known family, form a graph that is no chain."""
        return any(one is not None for one in (self.towers, self.encoder_decoder, self.image_text))

    @property
    def reads_tokens(self) -> bool:
        """False if samples are images, or vectors and rows of tables."""
        return not self.reads_images and (self.towers is None or bool(self.towers.tokens))

    @property
    def unit(self) -> str:
        """The parts of samples that speeds and costs count."""
        if self.reads_images:
            return "images"
        return "tokens" if self.reads_tokens and self.sequence > 1 else "samples"


def model_from(record: Mapping[str, Any]) -> ModelConfig:
    """Build the model from its `dataclasses.asdict` record, also after a JSON round trip."""
    convolutions, towers = (_with_tuples(record[key]) for key in ("convolutions", "towers"))
    sides, pair = record["encoder_decoder"], record["image_text"]
    parts = {
        "convolutions": Convolutions(**convolutions) if convolutions else None,
        "towers": Towers(**towers) if towers else None,
        "encoder_decoder": EncoderDecoder(**sides) if sides else None,
        "image_text": ImageText(**pair) if pair else None,
        "decoder": None if record["decoder"] is None else decoder_from(record["decoder"]),
    }
    return ModelConfig(**{**record, **parts})


def _with_tuples(sizes: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the sizes with tuples in the place of lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in (sizes or {}).items()}


def image_tokens(image_size: int, patch_size: int) -> int:
    """Return the tokens of an image: its patches and the class token."""
    return (image_size // patch_size) ** 2 + 1


# The fields of `ModelConfig` and the keys of `config.json`, by family.
_KEYS: Mapping[str, Mapping[str, str]] = {
    "gpt": {"norm_epsilon": "layer_norm_epsilon"},
    "llama": {"norm_epsilon": "rms_norm_eps", "rotary_base": "rope_theta"},
    "bert": {"norm_epsilon": "layer_norm_eps"},
    "vit": {"norm_epsilon": "layer_norm_eps"},
}
# The tables of rotary positions: all their keys, in newer versions of `transformers`, and their scaling.
_ROTARY, _SCALING = "rope_parameters", "rope_scaling"


def read_constants(
    record: Mapping[str, Any], family: str, where: str
) -> tuple[dict[str, float], list[Violation]]:
    """Return the constants of a model configuration, and the mistakes in them."""
    constants: dict[str, float] = {}
    problems: list[Violation] = []
    rotary = record.get(_ROTARY)
    for table in (_ROTARY, _SCALING):
        problems += _scaling_problems(record.get(table), f"{where}: {table}")
    for name, key in _KEYS.get(family, {}).items():
        value = record.get(key)
        if value is None and isinstance(rotary, Mapping):
            value = rotary.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            problems.append(Violation(f"{where}: {key}", f"{shown(value)}: must be a number above 0"))
        else:
            constants[name] = float(value)
    return constants, problems


def _scaling_problems(table: Any, where: str) -> list[Violation]:
    """Return the mistakes in a table of rotary positions, which a configuration may lack."""
    if table is None:
        return []
    if not isinstance(table, Mapping):
        return [Violation(where, f"{shown(table)}: must be an object")]
    factor = table.get("factor")
    if factor is None:
        return []
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
        return [Violation(f"{where}.factor", f"{shown(factor)}: must be a number above 0")]
    return []
