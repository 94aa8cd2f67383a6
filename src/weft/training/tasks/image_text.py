"""`image-text-matching`: texts that name the class of an image, or another one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from weft.describe.tasks import MATCHING, only_source
from weft.errors import InputError, Violation
from weft.program.arrays import Ints
from weft.randomness import counter_seed
from weft.run.workspace import Samples
from weft.training.data.images import DIGITS, open_images
from weft.training.tasks.base import TaskSettings, binary_cross_entropy

# The names of the classes, and how many texts each image has in training.
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEXTS = 4


class ImageTextMatching:
    """Digits, each with the name of a digit in bytes, half of them their own; the loss is in nats.

    Raises:
        InputError: if the data are not the digits, or the model reads no images or too short texts.
    """

    tokens_per_sample = 1

    def __init__(self, settings: TaskSettings) -> None:
        source, longest = only_source(settings.data), max(map(len, NAMES))
        if source != DIGITS:
            raise InputError(Violation("task.data", f"{source!r}: images with names are digits", DIGITS))
        if not settings.image_size or settings.sequence < longest or settings.vocabulary < 256:
            problem = f"it must read images, and texts of {longest} bytes"
            raise InputError(Violation("model", problem, "image-text-tiny"))
        self._images = open_images(
            DIGITS,
            size=settings.image_size,
            channels=settings.channels,
            classes=len(NAMES),
            cache=settings.cache,
        )
        self._texts = np.array([list(one.encode().ljust(settings.sequence)) for one in NAMES])
        self.samples = TEXTS * len(self._images.training)
        self.held_out_samples = TEXTS * len(self._images.held_out)
        self.fingerprint = f"{MATCHING} {self._images.fingerprint} {settings.sequence}"

    def batch(self, samples: Ints, *, held_out: bool = False) -> Samples:
        """Return pixels from -1 to 1 and bytes (samples, sequence), and targets 1 or 0, fp32.

        A sample's number decides whether its text is right, and which wrong one it is.
        """
        side = self._images.held_out if held_out else self._images.training
        labels = side.labels[samples % len(side)]
        drawn = [counter_seed(0, MATCHING, int(held_out), number) for number in samples.tolist()]
        random = np.array([number % 18 for number in drawn])
        other = np.where(random < len(NAMES) - 1, 1 + random, 0)
        pixels = torch.from_numpy(side.pixels[samples % len(side)]).to(torch.float32)
        texts = torch.from_numpy(self._texts[(labels + other) % len(NAMES)])
        return (pixels.div_(127.5).sub_(1.0), texts), torch.from_numpy((other == 0).astype(np.float32))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the binary cross entropy of log-odds (samples, 1), in fp32 or wider."""
        return binary_cross_entropy(outputs, targets)

    def metrics(self, outputs: torch.Tensor, targets: torch.Tensor) -> Mapping[str, float]:
        """Return `accuracy`: the share of samples with the right sign of the log-odds."""
        return {"accuracy": ((outputs.flatten() > 0) == (targets > 0)).double().mean().item()}
