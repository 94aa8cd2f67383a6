"""Sizes of models that are graphs of layers: towers, and encoder with decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.describe.model import EncoderDecoder, ImageText, ModelConfig, Towers


def tower_config(
    name: str,
    *,
    family: str,
    depth: int,
    tokens: Sequence[int] = (),
    features: Sequence[int] = (),
    tables: Sequence[int] = (),
    looked_up: int = 0,
    joint_depth: int = 0,
    hidden: int = 0,
    heads: int = 0,
    feed_forward: int = 0,
    vocabulary: int = 1,
    sequence: int = 1,
) -> ModelConfig:
    """Build a model of towers: of transformer blocks if `tokens` are given, else of features and tables."""
    before_the_head = len(tokens) * (depth + 1) + len(features) * depth + len(tables) + joint_depth
    return ModelConfig(
        name=name,
        family=family,
        layers=before_the_head - 1,
        hidden=hidden,
        heads=heads,
        key_value_heads=heads,
        feed_forward=feed_forward or 4 * hidden,
        vocabulary=vocabulary,
        sequence=sequence,
        towers=Towers(
            depth=depth,
            tokens=tuple(tokens),
            features=tuple(features),
            tables=tuple(tables),
            looked_up=looked_up,
            joint_depth=joint_depth,
        ),
    )


def encoder_decoder_config(
    name: str,
    *,
    family: str,
    encoder_layers: int,
    decoder_layers: int,
    hidden: int,
    heads: int,
    feed_forward: int,
    vocabulary: int,
    sequence: int,
    tied_embeddings: bool = False,
    head_size: int = 0,
    record: str = "",
    **rest: Any,
) -> ModelConfig:
    """Build a transformer with an encoder and a decoder; `rest` are further fields of `EncoderDecoder`."""
    return ModelConfig(
        name=name,
        family=family,
        # Beside the blocks, two embeddings, the encoder's last norm and the head.
        layers=encoder_layers + decoder_layers + 2,
        hidden=hidden,
        heads=heads,
        key_value_heads=heads,
        feed_forward=feed_forward,
        vocabulary=vocabulary,
        sequence=sequence,
        tied_embeddings=tied_embeddings,
        record=record,
        encoder_decoder=EncoderDecoder(
            encoder_layers=encoder_layers,
            decoder_layers=decoder_layers,
            head_size=head_size or hidden // heads,
            **rest,
        ),
    )


def image_text_config(
    name: str,
    *,
    hidden: int,
    heads: int,
    feed_forward: int,
    vocabulary: int,
    sequence: int,
    image_size: int,
    patch_size: int,
    channels: int,
    record: str = "",
    family: str,
    **rest: Any,
) -> ModelConfig:
    """Build a model of images and texts; `rest` are the fields of `ImageText`."""
    sizes = ImageText(**rest)
    return ModelConfig(
        name=name,
        family=family,
        # Beside the blocks, two embeddings, two projections and the head.
        layers=sizes.image_layers + sizes.text_layers + 3,
        hidden=hidden,
        heads=heads,
        key_value_heads=heads,
        feed_forward=feed_forward,
        vocabulary=vocabulary,
        sequence=sequence,
        image_size=image_size,
        patch_size=patch_size,
        channels=channels,
        image_text=sizes,
        record=record,
    )
