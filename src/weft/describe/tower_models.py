"""Sizes of models of towers, from a preset."""

from __future__ import annotations

from collections.abc import Sequence

from weft.describe.model import ModelConfig, Towers


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
