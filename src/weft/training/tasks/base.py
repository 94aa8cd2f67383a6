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

from weft.describe.run_tables.training import BYTES
from weft.run.parallel.context.divided_tokens import DividedTokens
from weft.run.parallel.divided_logits import IGNORED, DividedLogits

Ints = npt.NDArray[np.int64]
# Of a last stage: all of it, or a tensor or context rank's share of the logits.
Outputs = torch.Tensor | DividedLogits | DividedTokens


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
        tokenizer: `bytes`, or the file or folder of a `tokenizer.json`.
    """

    data: str
    sequence: int
    vocabulary: int
    cache: Path
    seed: int = 0
    image_size: int = 0
    channels: int = 0
    tokenizer: str = BYTES


class Task(Protocol):
    """Samples by number and the loss that the last stage computes.

    A task may also have `metrics(outputs, targets) -> Mapping[str, float]`: means over one micro-batch of
    what is told of held-out samples next to the loss (`weft.training.evaluation.meter`); `about`, a mapping
    that the event `data` shows, whose `warning` is printed; `sample_name(sample)` for errors;
    `bytes_per_token` of held-out text; and `takes_divided_logits` and `takes_divided_tokens`, true where loss
    and metrics also take `DividedLogits`, which tensor ranks have, and `DividedTokens`, which context ranks
    have, beside tensor ranks, too. Any other task is given all logits on every rank. Targets are always those
    of all tokens.

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


def cross_entropy(logits: Outputs, targets: torch.Tensor, ignored: int = IGNORED) -> torch.Tensor:
    """Mean cross entropy, in fp32 or wider, of logits (..., classes) at targets (...) but the `ignored`."""
    if not isinstance(logits, torch.Tensor):
        return logits.cross_entropy(targets, ignored)
    whole = in_fp32(logits.flatten(0, -2))
    return torch.nn.functional.cross_entropy(whole, targets.flatten(), ignore_index=ignored)


def most_likely(logits: Outputs) -> torch.Tensor:
    """Return the class with the largest of the logits (..., classes), shape (...)."""
    return logits.argmax(-1) if isinstance(logits, torch.Tensor) else logits.argmax()


def in_fp32(logits: torch.Tensor) -> torch.Tensor:
    """Logits in fp32, or as they are when they are wider."""
    return logits.float() if logits.dtype.itemsize < torch.float32.itemsize else logits
