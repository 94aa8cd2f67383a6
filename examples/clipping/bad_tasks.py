"""Two small tasks with bad samples: digits with wrong labels, and text with garbage or a second source.

Models are functions of their parameters. These have a first axis of models, so that one call computes the
losses, and one backward pass the gradients, of many micro-batches and trainings.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch.nn import functional

sys.path.append(str(Path(__file__).parent.parent / "experts"))

from corpora import write_sources

# The parts of the held-out samples: one tunes rates, the other is reported.
TUNING, REPORTED = 0, 1


class BadSamples(NamedTuple):
    """The training samples of one run: inputs (samples, ...), targets, and which are bad, (samples,).

    `sources` are those of the data, (samples,).
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    bad: torch.Tensor
    sources: torch.Tensor


class BadTask(ABC):
    """A task; `shapes` are those of a model's parameters, and `adaptive` ones take steps of Adam.

    `rates` are the first learning rates that are tried.
    """

    batch = 32
    shapes: tuple[tuple[int, ...], ...]
    adaptive: bool
    rates: tuple[float, ...]

    @abstractmethod
    def samples(self, bad: float, generator: torch.Generator) -> BadSamples: ...

    @abstractmethod
    def losses(
        self, parameters: Sequence[torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """The loss of each sample, (models, samples), from those of each model, (models, samples, ...)."""

    @abstractmethod
    def held_out(self, parameters: Sequence[torch.Tensor], part: int) -> dict[str, torch.Tensor]:
        """The figures of each model on clean samples, (models,); the first one tunes the rate."""

    @abstractmethod
    def error(self, figure: torch.Tensor) -> torch.Tensor:
        """The first figure as one that is better when it is less."""

    def start(self, generator: torch.Generator) -> torch.Tensor:
        """Parameters at the start, flat, (n,); a matrix has one row for each input."""
        parts = [
            torch.randn(shape, generator=generator) / math.sqrt(shape[0])
            if len(shape) > 1
            else torch.zeros(shape)
            for shape in self.shapes
        ]
        return torch.cat([part.flatten() for part in parts])

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Parameters of models, (models, ...) each, from the flat ones, (models, n)."""
        sizes = [math.prod(shape) for shape in self.shapes]
        parts = zip(flat.split(sizes, dim=1), self.shapes, strict=True)
        return [part.reshape(len(flat), *shape) for part, shape in parts]


class Digits(BadTask):
    """Handwritten digits of 8 x 8 pixels, read by a network with one hidden layer."""

    HIDDEN, HELD_OUT = 32, 300
    shapes = ((64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,))

    def __init__(self, adaptive: bool) -> None:
        from sklearn.datasets import load_digits

        self.adaptive = adaptive
        self.rates = (0.001, 0.002, 0.004, 0.008) if adaptive else (0.1, 0.2, 0.4, 0.8)
        data = load_digits()
        order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
        images = torch.from_numpy(data.data).float()[order] / 8.0 - 1.0
        labels = torch.from_numpy(data.target).long()[order]
        rest = len(labels) - 2 * self.HELD_OUT
        sizes = [self.HELD_OUT, self.HELD_OUT, rest]
        *self._clean, (self._images, self._labels) = zip(
            images.split(sizes), labels.split(sizes), strict=True
        )

    def samples(self, bad: float, generator: torch.Generator) -> BadSamples:
        count = len(self._labels)
        wrong = torch.zeros(count, dtype=torch.bool)
        wrong[torch.randperm(count, generator=generator)[: round(bad * count)]] = True
        others = (self._labels + torch.randint(1, 10, (count,), generator=generator)) % 10
        labels = torch.where(wrong, others, self._labels)
        return BadSamples(self._images, labels, wrong, torch.zeros(count, dtype=torch.long))

    def _logits(self, parameters: Sequence[torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
        first, first_bias, last, last_bias = parameters
        hidden = torch.baddbmm(first_bias.unsqueeze(1), inputs, first).relu()
        return torch.baddbmm(last_bias.unsqueeze(1), hidden, last)

    def losses(
        self, parameters: Sequence[torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        logits = self._logits(parameters, inputs)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(
            targets
        )

    def held_out(self, parameters: Sequence[torch.Tensor], part: int) -> dict[str, torch.Tensor]:
        images, labels = self._clean[part]
        found = self._logits(parameters, images.expand(len(parameters[0]), -1, -1)).argmax(2)
        return {"accuracy": (found == labels).double().mean(1)}

    def error(self, figure: torch.Tensor) -> torch.Tensor:
        return 1.0 - figure


class Text(BadTask):
    """Prose as bytes, read by a causal transformer of one layer; some samples are garbage, or sums.

    `second` is the share of the samples that are sums of numbers: clean ones of another source.
    """

    WIDTH, LENGTH, HEADS, COUNT, HELD_OUT = 32, 32, 2, 2400, 320
    shapes = ((256, WIDTH), (LENGTH, WIDTH), (WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 64), (64, WIDTH))
    adaptive = True
    rates = (0.004, 0.008, 0.016)

    def __init__(self, second: float = 0.0) -> None:
        self._second = second
        with TemporaryDirectory() as folder:
            sources = write_sources(Path(folder))
            self._texts = {name: self._read(sources[name]) for name in ("prose", "sums")}

    def _read(self, folder: Path) -> torch.Tensor:
        """Samples of a source, (samples, bytes), the held-out ones first."""
        text = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        samples = tokens[: len(tokens) // (self.LENGTH + 1) * (self.LENGTH + 1)].view(-1, self.LENGTH + 1)
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
        return samples[order[: self.COUNT + 2 * self.HELD_OUT]]

    def samples(self, bad: float, generator: torch.Generator) -> BadSamples:
        sums = round(self._second * self.COUNT)
        own = {"prose": self.COUNT - sums, "sums": sums}
        texts = torch.cat([self._texts[name][2 * self.HELD_OUT :][:count] for name, count in own.items()])
        garbage = torch.zeros(self.COUNT, dtype=torch.bool)
        garbage[torch.randperm(self.COUNT, generator=generator)[: round(bad * self.COUNT)]] = True
        noise = torch.randint(256, texts.shape, generator=generator)
        texts = torch.where(garbage.unsqueeze(1), noise, texts)
        sources = torch.repeat_interleave(torch.arange(2), torch.tensor(list(own.values())))
        return BadSamples(texts[:, :-1], texts[:, 1:], garbage, sources)

    def start(self, generator: torch.Generator) -> torch.Tensor:
        flat = super().start(generator)
        # Embeddings have no inputs to add up, and the first one is the last layer, too.
        flat[: (256 + self.LENGTH) * self.WIDTH].normal_(0.0, 0.1, generator=generator)
        return flat

    def losses(
        self, parameters: Sequence[torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        embedding, places, attention, mixing, widening, narrowing = parameters
        models, samples, length = inputs.shape
        rows = inputs + 256 * torch.arange(models).view(-1, 1, 1)
        state = functional.embedding(rows, embedding.flatten(0, 1)) + places.unsqueeze(1)
        state = state.flatten(1, 2)
        heads = torch.bmm(functional.layer_norm(state, (self.WIDTH,)), attention)
        heads = heads.view(models * samples, length, 3, self.HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        state = state + torch.bmm(seen.transpose(1, 2).reshape_as(state), mixing)
        wide = torch.bmm(functional.layer_norm(state, (self.WIDTH,)), widening).relu()
        state = state + torch.bmm(wide, narrowing)
        logits = torch.bmm(functional.layer_norm(state, (self.WIDTH,)), embedding.transpose(1, 2))
        losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(models, samples, length).mean(2)

    def held_out(self, parameters: Sequence[torch.Tensor], part: int) -> dict[str, torch.Tensor]:
        figures = {}
        for name in ("prose", "sums") if self._second else ("prose",):
            texts = self._texts[name][: 2 * self.HELD_OUT].split(self.HELD_OUT)[part]
            texts = texts.expand(len(parameters[0]), -1, -1)
            figures[name] = self.losses(parameters, texts[..., :-1], texts[..., 1:]).double().mean(1)
        if not self._second:
            return figures
        # The mean over the training's shares of the sources: its own aim.
        both = (1.0 - self._second) * figures["prose"] + self._second * figures["sums"]
        return {"both": both, **figures}

    def error(self, figure: torch.Tensor) -> torch.Tensor:
        return figure
