"""`causal-lm` and `masked-lm`: the prediction of the next tokens of text, or of masked ones from both sides.

In every sample of `masked-lm`, 15 % of the tokens are targets (Devlin et al., arXiv 1810.04805, section 3.1,
appendix A.1). The mask replaces 80 % of them and a random token 10 %; 10 % stay. Random numbers are keyed by
(seed, side, sample). So every plan of a job masks the same tokens, in every epoch. Every sample has the same
number of targets, so the mean of the micro-batches' means is the batch's mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import torch

from weft.describe.tasks import sources_of
from weft.program.arrays import Ints
from weft.program.codes import GOLDEN, mix
from weft.run.workspace import Samples
from weft.training.data.chats import Flags
from weft.training.data.sampler import Words
from weft.training.data.text import open_blend
from weft.training.data.tokenizers import Tokenizer, about, get_tokenizer, require_classes
from weft.training.tasks.base import Outputs, TaskSettings, cross_entropy, most_likely


class TextTask:
    """A corpus for a model with a class for each token and, if `masked`, for the mask.

    Raises:
        InputError: if the data is refused or the model has fewer classes.
    """

    takes_divided_logits = True
    takes_divided_tokens = True
    takes_unmade_logits = True

    def __init__(self, settings: TaskSettings, tokenizer: Tokenizer, *, masked: bool) -> None:
        require_classes(tokenizer, settings.vocabulary, masked=masked)
        self.corpus = open_blend(
            sources_of(settings.data), settings.sequence, tokenizer, settings.cache, settings.source_block
        )
        self.samples = len(self.corpus.training)
        self.held_out_samples = len(self.corpus.held_out)
        self.tokens_per_sample = settings.sequence
        self.fingerprint = self.corpus.fingerprint
        self.sources = self.corpus.sources
        self.about = about(tokenizer)
        repaired, first = self.corpus.repaired
        if repaired:
            problem = "bytes that are not UTF-8 are read as U+FFFD"
            self.about["warning"] = f"{repaired} documents, the first {first}: {problem}"

    def windows(self, samples: Ints, *, held_out: bool) -> Ints:
        """Return the tokens of samples with the last target, int64 of shape (samples, sequence + 1)."""
        return (self.corpus.held_out if held_out else self.corpus.training).take(samples)


class CausalLanguageModelling(TextTask):
    """Next-token prediction; the loss is in nats per token.

    Raises:
        InputError: if the data is refused or the model's vocabulary is smaller than the tokenizer's.
    """

    def __init__(self, settings: TaskSettings) -> None:
        tokenizer = get_tokenizer(settings.tokenizer)
        super().__init__(settings, tokenizer, masked=False)
        self._packing, self._end = settings.packing, tokenizer.end
        if self._packing:
            self.fingerprint += " in documents"
        self.bytes_per_token = self.corpus.held_out_bytes_per_token

    def batch(self, samples: Ints, *, held_out: bool = False) -> Samples:
        """Return tokens and their next tokens, both int64 of shape (samples, sequence).

        With packing, the lengths of documents follow. The end token of a document is its last one.
        """
        tokens = self.windows(samples, held_out=held_out)
        whole = torch.from_numpy(tokens)
        pair = whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
        return (*pair, [_lengths(row == self._end) for row in tokens[:, :-1]]) if self._packing else pair

    def loss(self, outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
        """Return the cross entropy of logits (samples, sequence, vocabulary), in fp32 or wider."""
        return cross_entropy(outputs, targets)


def _lengths(ends: Flags) -> list[int]:
    """Return the lengths of documents from the places of their last tokens; the last one may go on."""
    borders = [0, *(np.flatnonzero(ends) + 1).tolist()]
    return [last - first for first, last in pairwise([*borders, len(ends)]) if last > first]


MASKED_SHARE = 0.15
REPLACED_SHARE = 0.8
RANDOM_SHARE = 0.1
# The target value that cross entropy ignores.
NO_TARGET = -100

# Keys of a position's random numbers: the choice of targets, their replacement, and the random token.
_CHOOSE, _REPLACE, _TOKEN = np.arange(1, 4, dtype=np.uint64) * GOLDEN


class MaskedLanguageModelling(TextTask):
    """Prediction of masked tokens; the loss is in nats per masked token.

    The mask is the tokenizer's, or the id after its last one.

    Raises:
        InputError: if the data is refused or the model's vocabulary cannot hold the tokens and the mask.
    """

    def __init__(self, settings: TaskSettings) -> None:
        tokenizer = get_tokenizer(settings.tokenizer)
        super().__init__(settings, tokenizer, masked=True)
        self._mask = tokenizer.mask
        self._vocabulary = tokenizer.vocabulary
        self._seed = settings.seed

    def batch(self, samples: Ints, *, held_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return masked tokens, and the original tokens or `NO_TARGET`, both int64 (samples, sequence)."""
        tokens = self.windows(samples, held_out=held_out)[:, :-1]
        draws = _draws(self._seed, samples, tokens.shape[1], held_out=held_out)
        targets = chosen(draws, tokens.shape[1])
        fate = _uniform(draws, _REPLACE)
        random = (mix(draws + _TOKEN) % np.uint64(self._vocabulary)).astype(np.int64)
        inputs = np.where(targets & (fate < REPLACED_SHARE), self._mask, tokens)
        lottery = targets & (fate >= REPLACED_SHARE) & (fate < REPLACED_SHARE + RANDOM_SHARE)
        inputs = np.where(lottery, random, inputs)
        return torch.from_numpy(inputs), torch.from_numpy(np.where(targets, tokens, NO_TARGET))

    def loss(self, outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
        """Return the cross entropy of logits (samples, sequence, vocabulary) at targets, in fp32 or wider."""
        return cross_entropy(outputs, targets, NO_TARGET)

    def metrics(self, outputs: Outputs, targets: torch.Tensor) -> Mapping[str, float]:
        """Return `accuracy`: the share of targets that have the largest logit."""
        asked = targets != NO_TARGET
        return {"accuracy": (most_likely(outputs) == targets)[asked].double().mean().item()}


def targets_per_sample(sequence: int) -> int:
    """Return the number of targets in a sample, at least one."""
    return max(1, round(MASKED_SHARE * sequence))


def chosen(draws: Words, sequence: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Return the mask of targets, the positions with the smallest words, shape (samples, sequence)."""
    order = np.argsort(mix(draws + _CHOOSE), axis=1, kind="stable")
    targets = np.zeros(draws.shape, dtype=bool)
    np.put_along_axis(targets, order[:, : targets_per_sample(sequence)], True, axis=1)
    return targets


def _draws(seed: int, samples: Ints, sequence: int, *, held_out: bool) -> Words:
    """Return a random word for every position of every sample, shape (samples, sequence)."""
    side = mix(np.array([seed, int(held_out)], dtype=np.uint64) + GOLDEN)
    key = mix(side[:1] + side[1:] * GOLDEN + samples.astype(np.uint64) * GOLDEN)
    return mix(key[:, None] + np.arange(sequence, dtype=np.uint64) * GOLDEN)


def _uniform(draws: Words, number: np.uint64) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return numbers from 0 to 1, without 1, from the upper 53 bits of random words."""
    uniform: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = np.multiply(
        mix(draws + number) >> np.uint64(11), 2.0**-53, dtype=np.float64
    )
    return uniform
