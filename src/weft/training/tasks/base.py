"""The interface of a task: samples, a loss and nothing else.

A user's own task is a class with this interface, named in the run file as `kind = "package.module:Task"`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from weft.describe.model import Towers
from weft.describe.run_tables.training import BYTES
from weft.describe.tasks import Data
from weft.program.arrays import Ints
from weft.run.parallel.context.divided_tokens import DividedTokens
from weft.run.parallel.divided_logits import IGNORED, DividedLogits
from weft.run.parallel.unmade_logits import UnmadeLogits
from weft.run.resources import LossFunction
from weft.run.workspace import Samples
from weft.training.coordination.agreement import gather
from weft.training.data.text import Source

# The outputs of a last stage: all logits, the share of a tensor or context rank, or those of a loss kernel.
Outputs = torch.Tensor | DividedLogits | DividedTokens | UnmadeLogits


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """The settings of a task.

    Attributes:
        data: the source in the run file's notation, or sources of text with their weights.
        sequence: tokens per sample that the model reads.
        vocabulary: classes of the model's head.
        cache: the folder for prepared data, shared by all runs.
        seed: the key of a task's random numbers; the same for every plan of a job.
        image_size, channels: size of the images that the model reads; 0 for a model of text.
        tokenizer: `bytes`, or the file or folder of a `tokenizer.json`.
        source_block: samples of one source that follow each other, of several sources.
        packing: True if samples hold several documents, and batches tell their lengths.
        towers: the branches of a model with several inputs; None for any other.
    """

    data: Data
    sequence: int
    vocabulary: int
    cache: Path
    seed: int = 0
    image_size: int = 0
    channels: int = 0
    tokenizer: str = BYTES
    source_block: int = 1
    packing: bool = False
    towers: Towers | None = None


class Task(Protocol):
    """Samples by number and the loss that the last stage computes.

    A task may also have these members. `metrics(outputs, targets) -> Mapping[str, float]` returns means over
    one micro-batch of held-out samples (`weft.training.tasks.base`). `about` is a mapping for the event
    `data`; its `warning` is printed. `sample_name(sample)` names a sample in errors. `bytes_per_token` counts
    held-out text. `takes_divided_logits`: loss and metrics also take `DividedLogits`, from tensor ranks.
    `takes_divided_tokens`: they also take `DividedTokens`, from context ranks, with or without tensor ranks.
    `takes_unmade_logits`: they also take `UnmadeLogits`, which `plan.loss` other than "whole" needs.
    Any other task gets all logits on every rank. Targets always cover all tokens. `weighs_samples`: samples
    have unlike numbers of targets; `batch` also takes `among`, the samples whose mean a loss is a part of.
    `sources`: the sources of a blend (`weft.training.data.text.Source`), in the order of their samples.
    `mapped`: reads cost nothing, so every rank of a node reads for itself.

    Attributes:
        samples, held_out_samples: the number of each; held-out samples are never trained on.
        tokens_per_sample: targets per sample, the tokens of `tokens_per_s`.
        fingerprint: a text that changes with the data; a run resumes on the same data only.
    """

    samples: int
    held_out_samples: int
    tokens_per_sample: int
    fingerprint: str

    def __init__(self, settings: TaskSettings) -> None: ...

    def batch(self, samples: Ints, *, held_out: bool = False) -> Samples:
        """Return the inputs and the last stage's targets; all have the samples on the first axis.

        The inputs are a tensor, or a tuple of those that the model's layers read by their numbers.
        With `packing`, the lengths of the documents of each sample follow.
        """
        ...

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean over the targets of one micro-batch, a scalar.

        Micro-batches count equally, so every sample must have the same number of targets, or the task
        weighs them (`weighs_samples`).
        """
        ...


def batch_of(task: Task, samples: Ints, among: Callable[[], Ints], *, held_out: bool = False) -> Samples:
    """Return a micro-batch of a task; `among` returns the samples whose mean the loss is a part of.

    Raises:
        TypeError: when it has other tensors than inputs and targets of these samples.
    """
    batch: Callable[..., Any] = task.batch
    weighing = {"among": among()} if getattr(task, "weighs_samples", False) else {}
    read = batch(samples, held_out=held_out, **weighing)
    if not isinstance(read, tuple | list) or len(read) not in (2, 3):
        raise TypeError(f"batch returned {type(read).__name__}, no pair of inputs and targets")
    inputs = read[0] if isinstance(read[0], tuple) else (read[0],)
    for one in (*inputs, read[1]):
        if not isinstance(one, torch.Tensor):
            raise TypeError(f"batch returned {type(one).__name__} in place of a tensor")
        if not one.dim() or len(one) != len(samples):
            given = f"a tensor of shape {list(one.shape)}"
            raise TypeError(f"batch returned {given}; its first axis must be the {len(samples)} samples")
    return tuple(read)


def sources_of_task(task: Task) -> Sequence[Source]:
    """Return the sources of a task with several."""
    sources: Sequence[Source] = getattr(task, "sources", ())
    return sources


def cross_entropy(logits: Outputs, targets: torch.Tensor, ignored: int = IGNORED) -> torch.Tensor:
    """Return the mean cross entropy (fp32 or wider) of logits (..., classes), targets (...) not `ignored`."""
    if not isinstance(logits, torch.Tensor):
        return logits.cross_entropy(targets, ignored)
    whole = in_fp32(logits.flatten(0, -2))
    return torch.nn.functional.cross_entropy(whole, targets.flatten(), ignore_index=ignored)


def binary_cross_entropy(log_odds: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean binary cross entropy (fp32 or wider) of log-odds (b, 1) and targets 0 or 1 (b,)."""
    odds = in_fp32(log_odds).flatten()
    return torch.nn.functional.binary_cross_entropy_with_logits(odds, targets.to(odds.dtype))


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error (fp32 or wider) of outputs (b, 1) and targets (b,)."""
    found = in_fp32(outputs).flatten()
    return torch.nn.functional.mse_loss(found, targets.to(found.dtype))


def most_likely(logits: Outputs) -> torch.Tensor:
    """Return the class with the largest logit, shape (...), from logits (..., classes)."""
    return logits.argmax(-1) if isinstance(logits, torch.Tensor) else logits.argmax()


def in_fp32(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits in fp32, or unchanged if they are wider."""
    return logits.float() if logits.dtype.itemsize < torch.float32.itemsize else logits


Metrics = Mapping[str, float]


class Meter:
    """A wrapper of a task's loss; while it is open, every call also adds the metrics of its micro-batch.

    Only ranks with a last stage have outputs. If several have the same outputs, all of them count equally.
    """

    def __init__(self, task: Task) -> None:
        self._loss: LossFunction = task.loss
        self.takes_divided_logits = getattr(task, "takes_divided_logits", False)
        self.takes_divided_tokens = getattr(task, "takes_divided_tokens", False)
        self.takes_unmade_logits = getattr(task, "takes_unmade_logits", False)
        self._metrics: Callable[[Outputs, torch.Tensor], Metrics] | None = getattr(task, "metrics", None)
        self._open = False
        self._sums: dict[str, float] = {}
        self._micro_batches = 0

    def __call__(self, outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
        """Return the task's loss, mean over one micro-batch.

        Raises:
            TypeError: when the metrics are no mapping from names to numbers.
        """
        if self._open and self._metrics is not None:
            metrics = self._metrics(outputs.detach(), targets)
            if not isinstance(metrics, Mapping):
                raise TypeError(
                    f"metrics returned {type(metrics).__name__}, no mapping from names to numbers"
                )
            for name, value in metrics.items():
                self._sums[name] = self._sums.get(name, 0.0) + _number(name, value)
            self._micro_batches += 1
        return self._loss(outputs, targets)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Reset the sums and count until the end of the block."""
        self.reset()
        with self.counting():
            yield

    def reset(self) -> None:
        """Forget all that was counted."""
        self._sums, self._micro_batches = {}, 0

    @property
    def counted(self) -> tuple[dict[str, float], int]:
        """The sums of this rank so far, and the number of micro-batches."""
        return dict(self._sums), self._micro_batches

    def go_on(self, sums: Mapping[str, float], micro_batches: int) -> None:
        """Take up what was `counted` before."""
        self._sums, self._micro_batches = dict(sums), micro_batches

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count until the end of the block, on top of what is counted."""
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def collect(self) -> dict[str, float]:
        """Return the means over all ranks' micro-batches by name; every rank calls it."""
        counted = gather((self._sums, self._micro_batches))
        micro_batches = sum(count for _, count in counted)
        names = sorted({name for sums, _ in counted for name in sums})
        return {name: sum(sums.get(name, 0.0) for sums, _ in counted) / micro_batches for name in names}


def _number(name: str, value: Any) -> float:
    """Return a metric as a number; raise TypeError with its name if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"metrics returned {type(value).__name__} as {name!r}, no single number") from None
