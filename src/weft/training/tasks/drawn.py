"""Tasks with several inputs and synthetic data: modalities, clicks, responses to doses, translations."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft.describe.model import Towers
from weft.errors import InputError, Violation
from weft.program.arrays import Ints
from weft.run.workspace import Samples
from weft.training.data.synthetic import (
    HELD_OUT,
    TRAINING,
    Clicks,
    DoseResponses,
    Modalities,
    SyntheticSamples,
    Translations,
    require_synthetic,
)
from weft.training.tasks.base import (
    Outputs,
    TaskSettings,
    binary_cross_entropy,
    cross_entropy,
    most_likely,
    squared_error,
)


class DrawnTask:
    """Samples with several inputs, each of which a layer of the model reads.

    Raises:
        InputError: if the data are not synthetic, or the model has other inputs.
    """

    samples, held_out_samples = TRAINING, HELD_OUT

    def __init__(self, settings: TaskSettings) -> None:
        require_synthetic(settings.data)
        self.tokens_per_sample = settings.sequence
        self.drawn = self.open(settings)
        self.fingerprint = self.drawn.fingerprint

    def open(self, settings: TaskSettings) -> SyntheticSamples:
        """Return the samples of the model."""
        raise NotImplementedError

    def batch(self, samples: Ints, *, held_out: bool = False) -> Samples:
        """Return the inputs and targets: int64 tokens, rows and classes, else fp32."""
        inputs, targets = self.drawn.draw(samples, held_out=held_out)
        return tuple(map(torch.from_numpy, inputs)), torch.from_numpy(targets)


def towers_of(settings: TaskSettings) -> Towers:
    """Return the towers of the model.

    Raises:
        InputError: if it has none.
    """
    if settings.towers is None:
        problem = "it has one input; the task needs a model that weft knows with one for each tower"
        raise InputError(Violation("model", problem, "mmt-tiny"))
    return settings.towers


class MultimodalClassification(DrawnTask):
    """The class of several modalities together; the loss is in nats per sample."""

    def open(self, settings: TaskSettings) -> SyntheticSamples:
        return Modalities(towers_of(settings), sequence=settings.sequence, classes=settings.vocabulary)

    def loss(self, outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
        """Return the cross entropy of logits (samples, classes), in fp32 or wider."""
        return cross_entropy(outputs, targets)

    def metrics(self, outputs: Outputs, targets: torch.Tensor) -> Mapping[str, float]:
        """Return `accuracy`: the share of samples with the largest logit at their class."""
        return {"accuracy": (most_likely(outputs) == targets).double().mean().item()}


class ClickPrediction(DrawnTask):
    """Prediction of clicks; the loss is in nats per sample."""

    def open(self, settings: TaskSettings) -> SyntheticSamples:
        return Clicks(towers_of(settings))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the binary cross entropy of log-odds (samples, 1), in fp32 or wider."""
        return binary_cross_entropy(outputs, targets)

    def metrics(self, outputs: torch.Tensor, targets: torch.Tensor) -> Mapping[str, float]:
        """Return `accuracy`: the share of samples with the right sign of the log-odds."""
        return {"accuracy": ((outputs.flatten() > 0) == (targets > 0)).double().mean().item()}


class DoseResponse(DrawnTask):
    """A cell's growth under doses of drugs; the loss is the squared error."""

    drawn: DoseResponses

    def open(self, settings: TaskSettings) -> SyntheticSamples:
        return DoseResponses(towers_of(settings))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error of growths (samples, 1), in fp32 or wider."""
        return squared_error(outputs, targets)

    def metrics(self, outputs: torch.Tensor, targets: torch.Tensor) -> Mapping[str, float]:
        """Return `r_squared`: one less the squared error by the variance of held-out targets."""
        error = squared_error(outputs, targets).item()
        return {"r_squared": 1.0 - error / self.drawn.held_out_variance}


class SequenceToSequence(DrawnTask):
    """Translations, token by token; the loss is in nats per token."""

    def open(self, settings: TaskSettings) -> SyntheticSamples:
        return Translations(sequence=settings.sequence, vocabulary=settings.vocabulary)

    def loss(self, outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
        """Return the cross entropy of logits (samples, sequence, vocabulary), in fp32 or wider."""
        return cross_entropy(outputs, targets)

    def metrics(self, outputs: Outputs, targets: torch.Tensor) -> Mapping[str, float]:
        """Return `accuracy`: the share of tokens with the largest logit at the right one."""
        return {"accuracy": (most_likely(outputs) == targets).double().mean().item()}
