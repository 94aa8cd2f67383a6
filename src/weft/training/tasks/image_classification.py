"""`image-classification`: the class of every image."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft.describe.tasks import only_source
from weft.errors import InputError, Violation
from weft.program.arrays import Ints
from weft.training.data.images import open_images
from weft.training.tasks.base import Outputs, TaskSettings, cross_entropy, most_likely


class ImageClassification:
    """Classes of digits or of a folder's images; the loss is in nats per image.

    Raises:
        InputError: if the data is refused or the model does not read images.
    """

    tokens_per_sample = 1

    def __init__(self, settings: TaskSettings) -> None:
        if not settings.image_size:
            problem = "the model reads text; image-classification needs one that reads images"
            raise InputError(Violation("model", problem, "vit-digits"))
        self._images = open_images(
            only_source(settings.data),
            size=settings.image_size,
            channels=settings.channels,
            classes=settings.vocabulary,
            cache=settings.cache,
        )
        self.samples = len(self._images.training)
        self.held_out_samples = len(self._images.held_out)
        self.fingerprint = self._images.fingerprint

    def batch(self, samples: Ints, *, held_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return pixels from -1 to 1, fp32 (samples, channels, size, size), and labels, int64 (samples,)."""
        images = self._images.held_out if held_out else self._images.training
        pixels = torch.from_numpy(images.pixels[samples]).to(torch.float32)
        return pixels.div_(127.5).sub_(1.0), torch.from_numpy(images.labels[samples])

    def loss(self, outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
        """Return the cross entropy of logits (samples, classes), in fp32 or wider."""
        return cross_entropy(outputs, targets)

    def metrics(self, outputs: Outputs, targets: torch.Tensor) -> Mapping[str, float]:
        """Return `accuracy`: the share of images with the largest logit at their class."""
        return {"accuracy": (most_likely(outputs) == targets).double().mean().item()}
