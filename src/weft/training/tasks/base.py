"""What a task is: samples, a loss and nothing else.

A task of one's own is a class with this shape, named in the run file as `kind = "package.module:Task"`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """What a task is made from.

    Attributes:
        data: the source as the run file names it.
        sequence: tokens per sample that the model reads.
        vocabulary: classes of the model's head.
        cache: folder for prepared data, shared by all runs.
        seed: keys what a task draws; the same for every plan of a job.
        image_size, channels: of the images that the model reads; 0 for a model of text.
    """

    data: str
    sequence: int
    vocabulary: int
    cache: Path
    seed: int = 0
    image_size: int = 0
    channels: int = 0


class Task(Protocol):
    """Samples by number and the loss that the last stage computes.

    A task may also have `metrics(outputs, targets) -> Mapping[str, float]`: means over one micro-batch of
    what is told of held-out samples next to the loss (`weft.training.meter`).

    Attributes:
        samples, held_out_samples: how many there are of each; held-out samples are never trained on.
        tokens_per_sample: targets per sample, what `tokens_per_s` counts.
        fingerprint: changes when the data changes; a run resumes on the same data only.
    """

    samples: int
    held_out_samples: int
    tokens_per_sample: int
    fingerprint: str

    def __init__(self, settings: TaskSettings) -> None: ...

    def batch(self, samples: Ints, *, held_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs of the first stage and targets of the last one; their first dimension is `len(samples)`."""
        ...

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean over the targets of one micro-batch, a scalar.

        Micro-batches count equally, so every sample must have as many targets as any other.
        """
        ...


def in_fp32(logits: torch.Tensor) -> torch.Tensor:
    """Logits in fp32, or as they are when they are wider."""
    return logits.float() if logits.dtype.itemsize < torch.float32.itemsize else logits
