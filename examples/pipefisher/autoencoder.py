"""The autoencoder of digits, 64-128-64-32-10 and its mirror, as a model of one's own with its task."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import weft
from weft.training.tasks.base import TaskSettings

SIZES = (64, 128, 64, 32, 10, 32, 64, 128, 64)
PIXELS = SIZES[0]
# Whole micro-batches of 224.
SAMPLES = 1792


class Dense(nn.Module):
    """A linear layer, and tanh behind all but the last one."""

    def __init__(self, inner: int, columns: int, last: bool) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(inner, columns), last
        # With smaller weights, the code of all digits stays the same for hundreds of steps.
        nn.init.xavier_normal_(self.linear.weight, nn.init.calculate_gain("tanh"))
        nn.init.zeros_(self.linear.bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.linear(inputs)
        return outputs if self.last else torch.tanh(outputs)


def build() -> weft.BlockModel:
    sizes = list(pairwise(SIZES))
    layers = [partial(Dense, *size, place == len(sizes) - 1) for place, size in enumerate(sizes)]
    return weft.BlockModel(layers, example=torch.zeros(1, PIXELS), classes=PIXELS)


class Digits:
    """Digits of 8 x 8 pixels, from 0 to 1; the loss is the cross entropy of each pixel, in nats.

    The study is about how fast this loss falls, so no digits are held out: an evaluation has the same ones.
    """

    tokens_per_sample = PIXELS
    samples = held_out_samples = SAMPLES

    def __init__(self, settings: TaskSettings) -> None:
        self.fingerprint = f"{SAMPLES} digits of scikit-learn"
        self._pixels = torch.tensor(load_digits().data[:SAMPLES] / 16.0, dtype=torch.float32)

    def batch(self, samples: np.ndarray, *, held_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = self._pixels[torch.as_tensor(samples)]
        return pixels, pixels

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(outputs, targets)
