"""`masked-lm`: find the tokens that were taken out of a text, from both sides.

Of every sample 15 % of the tokens are targets; of these 80 % are replaced by the mask, 10 % by a random token
and 10 % stay (Devlin et al., arXiv 1810.04805, section 3.1 and appendix A.1). What is drawn is keyed by
(seed, side, sample), so every plan of a job masks the same tokens, in every epoch. Every sample has the same
number of targets, so the means of micro-batches add up to the mean of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from weft.training.data.sampler import GOLDEN, Ints, Words, mix
from weft.training.data.text import open_corpus
from weft.training.data.tokenizers import get_tokenizer
from weft.training.tasks.base import Outputs, TaskSettings, cross_entropy, most_likely
from weft.training.tasks.text import about_text, require_vocabulary

MASKED_SHARE = 0.15
REPLACED_SHARE = 0.8
RANDOM_SHARE = 0.1
# What cross entropy leaves out.
NO_TARGET = -100

# What is drawn for one position: whether it is a target, what becomes of it, and the random token.
_CHOOSE, _REPLACE, _TOKEN = np.arange(1, 4, dtype=np.uint64) * GOLDEN


class MaskedLanguageModelling:
    """Masked tokens; the mask is the tokenizer's, or the id after its last one; nats per masked token.

    Raises:
        InputError: when the data is refused or the model's vocabulary cannot hold the tokens and the mask.
    """

    takes_divided_logits = True
    takes_divided_tokens = True

    def __init__(self, settings: TaskSettings) -> None:
        tokenizer = get_tokenizer(settings.tokenizer)
        needed = max(tokenizer.vocabulary, tokenizer.mask + 1)
        require_vocabulary(settings.vocabulary, needed, f"tokens and the mask of {tokenizer.name}")
        self._corpus = open_corpus(settings.data, settings.sequence, tokenizer, settings.cache)
        self._mask = tokenizer.mask
        self._vocabulary = tokenizer.vocabulary
        self._seed = settings.seed
        self.samples = len(self._corpus.training)
        self.held_out_samples = len(self._corpus.held_out)
        self.tokens_per_sample = settings.sequence
        self.fingerprint = self._corpus.fingerprint
        self.about = about_text(tokenizer, self._corpus)

    def batch(self, samples: Ints, *, held_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens with masks, and the tokens that were there or `NO_TARGET`: int64 (samples, sequence)."""
        windows = self._corpus.held_out if held_out else self._corpus.training
        tokens = windows.take(samples)[:, :-1]
        draws = _draws(self._seed, samples, tokens.shape[1], held_out=held_out)
        targets = chosen(draws, tokens.shape[1])
        fate = _uniform(draws, _REPLACE)
        random = (mix(draws + _TOKEN) % np.uint64(self._vocabulary)).astype(np.int64)
        inputs = np.where(targets & (fate < REPLACED_SHARE), self._mask, tokens)
        lottery = targets & (fate >= REPLACED_SHARE) & (fate < REPLACED_SHARE + RANDOM_SHARE)
        inputs = np.where(lottery, random, inputs)
        return torch.from_numpy(inputs), torch.from_numpy(np.where(targets, tokens, NO_TARGET))

    def loss(self, outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
        """Cross entropy of logits (samples, sequence, vocabulary) at the targets, in fp32 or wider."""
        return cross_entropy(outputs, targets, NO_TARGET)

    def metrics(self, outputs: Outputs, targets: torch.Tensor) -> Mapping[str, float]:
        """`accuracy`: the share of targets that have the largest logit."""
        asked = targets != NO_TARGET
        return {"accuracy": (most_likely(outputs) == targets)[asked].double().mean().item()}


def targets_per_sample(sequence: int) -> int:
    """How many tokens of a sample are targets; at least one."""
    return max(1, round(MASKED_SHARE * sequence))


def chosen(draws: Words, sequence: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Which positions are targets: those with the smallest words, shape (samples, sequence)."""
    order = np.argsort(mix(draws + _CHOOSE), axis=1, kind="stable")
    targets = np.zeros(draws.shape, dtype=bool)
    np.put_along_axis(targets, order[:, : targets_per_sample(sequence)], True, axis=1)
    return targets


def _draws(seed: int, samples: Ints, sequence: int, *, held_out: bool) -> Words:
    """Return a word for every position of every sample, shape (samples, sequence)."""
    side = mix(np.array([seed, int(held_out)], dtype=np.uint64) + GOLDEN)
    key = mix(side[:1] + side[1:] * GOLDEN + samples.astype(np.uint64) * GOLDEN)
    return mix(key[:, None] + np.arange(sequence, dtype=np.uint64) * GOLDEN)


def _uniform(draws: Words, number: np.uint64) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """From 0 to 1 without 1; the upper 53 bits of a word are a double's."""
    uniform: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = np.multiply(
        mix(draws + number) >> np.uint64(11), 2.0**-53, dtype=np.float64
    )
    return uniform
