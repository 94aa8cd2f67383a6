"""Batches with several inputs, for models of towers and for models of one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from weft.describe.families.own import FAMILY, own_model
from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.run.workspace import Samples
from weft.training.data.synthetic import (
    Clicks,
    DoseResponses,
    Modalities,
    SyntheticSamples,
    Translations,
)


class _Pairs(SyntheticSamples):
    """Images and texts of random numbers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__("pairs")
        self._config = config

    def sample(self, random: np.random.Generator) -> tuple[tuple[Any, ...], Any]:
        config = self._config
        pixels = random.standard_normal((config.channels, config.image_size, config.image_size))
        text = random.integers(config.vocabulary, size=config.sequence)
        return (pixels.astype(np.float32), text), np.float32(random.integers(2))


def drawn_for(config: ModelConfig) -> SyntheticSamples:
    """The samples that a model with several inputs learns from."""
    if config.image_text is not None:
        return _Pairs(config)
    if config.encoder_decoder is not None:
        return Translations(sequence=config.sequence, vocabulary=config.vocabulary)
    assert config.towers is not None
    if config.towers.tokens:
        return Modalities(config.towers, sequence=config.sequence, classes=config.vocabulary)
    return Clicks(config.towers) if config.towers.tables else DoseResponses(config.towers)


def inputs_of_towers(config: ModelConfig, samples: int) -> tuple[torch.Tensor, ...]:
    inputs, _ = drawn_for(config).draw(np.arange(samples), held_out=False)
    return tuple(map(torch.from_numpy, inputs))


def batches_of_towers(config: ModelConfig, plan: Plan, step: int) -> Callable[[int], Samples]:
    """Samples keyed by (step, sample), so that the cut into micro-batches does not change them."""
    drawn = drawn_for(config)

    def micro_batch(number: int) -> Samples:
        first = 1000 * step + number * plan.micro_batch_size
        inputs, targets = drawn.draw(np.arange(first, first + plan.micro_batch_size), held_out=False)
        return tuple(map(torch.from_numpy, inputs)), torch.from_numpy(targets)

    return micro_batch


def has_several_inputs(config: ModelConfig) -> bool:
    """Whether a model is one's own, with several inputs."""
    return config.family == FAMILY and len(_input_shapes(config.name)) > 1


@cache
def _input_shapes(name: str) -> Sequence[tuple[int, ...]]:
    """The shapes of a model's inputs; its layers are built to know them, once."""
    model = own_model(name)
    return model.sample_shapes[: model.layer_graph().input_count]


def batches_of_vectors(config: ModelConfig, plan: Plan, step: int) -> Callable[[int], Samples]:
    """Normal numbers for all inputs of a model of one's own, and classes, keyed by (step, sample)."""
    shapes = _input_shapes(config.name)

    def micro_batch(number: int) -> Samples:
        first = 1000 * step + number * plan.micro_batch_size
        draws = [torch.Generator().manual_seed(first + place) for place in range(plan.micro_batch_size)]
        inputs = [torch.stack([torch.randn(shape, generator=one) for one in draws]) for shape in shapes]
        return tuple(inputs), torch.stack(
            [torch.randint(config.vocabulary, (), generator=one) for one in draws]
        )

    return micro_batch
