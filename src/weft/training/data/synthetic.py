"""Synthetic samples of models with several inputs: functions of random numbers that can be learned.

Sample n is drawn from a counter-based generator keyed by the kind of data and n. So every plan and every run
read the same samples. The functions that give the targets have fixed coefficients, keyed likewise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.describe.model import Towers
from weft.describe.tasks import SYNTHETIC, Data, only_source
from weft.errors import InputError, Violation
from weft.program.arrays import Ints
from weft.randomness import counter_seed

TRAINING, HELD_OUT = 2**16, 2**10
# Changes when a function of this module does.
VERSION = 1
# The share of a modality's tokens that tell of the class.
TELLING = 0.5
# Standard deviation of the error of a measured response, and the steepness of a dose's curve.
RESPONSE_ERROR, STEEPNESS = 0.05, 2.0

Floats = npt.NDArray[np.float32]


class Drawn(NamedTuple):
    """Samples: one array for each input, and targets, all with the samples on the first axis."""

    inputs: tuple[npt.NDArray[np.generic], ...]
    targets: npt.NDArray[np.generic]


def require_synthetic(data: Data) -> None:
    """Check that the data are synthetic.

    Raises:
        InputError: if they are another source, or several.
    """
    source = only_source(data)
    if source != SYNTHETIC:
        problem = f"{source!r}; the task has synthetic data alone; other data need a task of one's own"
        raise InputError(Violation("task.data", problem, SYNTHETIC))


class SyntheticSamples(ABC):
    """Samples by number; the held-out ones follow those of training."""

    def __init__(self, kind: str, *sizes: object) -> None:
        self._kind = kind
        self.fingerprint = " ".join(map(str, (SYNTHETIC, kind, VERSION, *sizes)))

    def draw(self, samples: Ints, *, held_out: bool) -> Drawn:
        """Return samples by number."""
        first = TRAINING if held_out else 0
        rows = [self.sample(self.generator("sample", first + number)) for number in samples.tolist()]
        inputs, targets = zip(*rows, strict=True)
        return Drawn(tuple(np.stack(one) for one in zip(*inputs, strict=True)), np.array(targets))

    @abstractmethod
    def sample(self, random: np.random.Generator) -> tuple[tuple[npt.NDArray[np.generic], ...], object]:
        """Return the inputs and the target of one sample."""

    def generator(self, *purpose: str | int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=counter_seed(VERSION, self._kind, *purpose)))

    def coefficients(self, *purpose: str | int, size: int) -> Floats:
        """Return normal numbers of mean 0 and standard deviation 1, shape (size,)."""
        return self.generator("coefficients", *purpose).standard_normal(size, dtype=np.float32)


class Modalities(SyntheticSamples):
    """Token sequences of several modalities, each of which shows one digit of the class alone.

    The class is written with one digit per tower, in the smallest base that suffices. Half of a tower's
    tokens, at random places, are its digit modulo the base; the others are any tokens.

    Raises:
        InputError: if a tower tells fewer tokens apart than a digit has values.
    """

    def __init__(self, towers: Towers, *, sequence: int, classes: int) -> None:
        super().__init__("modalities", towers, sequence, classes)
        self.towers, self._sequence, self._classes = towers, sequence, classes
        count = len(towers.tokens)
        self._base = next(base for base in range(1, classes + 1) if base**count >= classes)
        if min(towers.tokens) < self._base:
            problem = (
                f"a tower has {min(towers.tokens)} tokens; {classes} classes in {count} towers need more"
            )
            raise InputError(Violation("model: tokens", problem, str(self._base)))

    def sample(self, random: np.random.Generator) -> tuple[tuple[Ints, ...], int]:
        label = int(random.integers(self._classes))
        inputs = []
        for tower, tokens in enumerate(self.towers.tokens):
            digit = label // self._base**tower % self._base
            any_token = random.integers(tokens, size=self._sequence)
            telling = any_token // self._base * self._base + digit
            telling = np.where(telling < tokens, telling, telling - self._base)
            tells = random.random(self._sequence) < TELLING
            inputs.append(np.where(tells, telling, any_token))
        return tuple(inputs), label


class Clicks(SyntheticSamples):
    """Dense vectors and rows of tables, and whether a click follows.

    Vectors are normal, rows uniform. A vector's score is its product with fixed coefficients. A table's score
    is the sum over its rows. All have the variance 1. Some products of a vector's and a table's score join
    them. The log-odds of a click are twice their scaled sum.
    """

    def __init__(self, towers: Towers) -> None:
        super().__init__("clicks", towers)
        self.towers = towers

    @cached_property
    def _weights(self) -> list[Floats]:
        return [
            self.coefficients("vector", tower, size=size) * size**-0.5
            for tower, size in enumerate(self.towers.features)
        ]

    @cached_property
    def _row_scores(self) -> list[Floats]:
        scale = self.towers.looked_up**-0.5
        return [
            self.coefficients("table", table, size=rows) * scale
            for table, rows in enumerate(self.towers.tables)
        ]

    def sample(self, random: np.random.Generator) -> tuple[tuple[npt.NDArray[np.generic], ...], np.float32]:
        vectors = [random.standard_normal(size, dtype=np.float32) for size in self.towers.features]
        rows = [random.integers(size, size=self.towers.looked_up) for size in self.towers.tables]
        dense = [float(one @ weights) for one, weights in zip(vectors, self._weights, strict=True)]
        sparse = [float(scores[one].sum()) for one, scores in zip(rows, self._row_scores, strict=True)]
        scores = [*dense, *sparse, *(one * other for one, other in zip(dense, sparse, strict=False))]
        odds = np.exp(2.0 * sum(scores) * len(scores) ** -0.5)
        return (*vectors, *rows), np.float32(random.random() < odds / (1.0 + odds))


class DoseResponses(SyntheticSamples):
    """Vectors that describe cells and drugs, doses, and a cell's growth under them.

    Vectors are normal. Those of one number are doses, on a logarithmic scale. The others give a resistance,
    the scaled sum of their rectified products with fixed coefficients. Growth is the mean over the doses of
    a logistic curve of resistance less dose, measured with a normal error.
    """

    def __init__(self, towers: Towers) -> None:
        super().__init__("dose responses", towers)
        self.towers = towers

    @cached_property
    def _weights(self) -> list[Floats]:
        return [
            self.coefficients(tower, size=size) * size**-0.5
            for tower, size in enumerate(self.towers.features)
        ]

    @cached_property
    def held_out_variance(self) -> float:
        """The variance of all held-out targets."""
        return float(self.draw(np.arange(HELD_OUT), held_out=True).targets.astype(np.float64).var())

    def sample(self, random: np.random.Generator) -> tuple[tuple[Floats, ...], np.float32]:
        vectors = tuple(random.standard_normal(size, dtype=np.float32) for size in self.towers.features)
        doses = [float(one[0]) for one in vectors if len(one) == 1] or [0.0]
        scores = [
            abs(float(one @ weights)) - 0.5
            for one, weights in zip(vectors, self._weights, strict=True)
            if len(one) > 1
        ]
        resistance = sum(scores) * max(1, len(scores)) ** -0.5
        growth = np.mean([1.0 / (1.0 + np.exp(STEEPNESS * (dose - resistance))) for dose in doses])
        return vectors, np.float32(growth + RESPONSE_ERROR * random.standard_normal())


class Translations(SyntheticSamples):
    """Sentences and their translations: each token becomes a fixed other one, and the order turns round.

    Token 0 begins the decoder's input, which is else the translation one token later.
    """

    def __init__(self, *, sequence: int, vocabulary: int) -> None:
        super().__init__("translations", sequence, vocabulary)
        self._sequence, self._vocabulary = sequence, vocabulary

    @cached_property
    def _words(self) -> Ints:
        return 1 + self.generator("words").permutation(self._vocabulary - 1)

    def sample(self, random: np.random.Generator) -> tuple[tuple[Ints, ...], Ints]:
        sentence = random.integers(1, self._vocabulary, size=self._sequence)
        translation = self._words[sentence[::-1] - 1]
        return (sentence, np.concatenate([[0], translation[:-1]])), translation
