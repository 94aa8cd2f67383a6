"""The data of the tasks of text."""

from __future__ import annotations

from weft.errors import InputError, Violation
from weft.program.arrays import Ints
from weft.training.data.text import open_corpus
from weft.training.data.tokenizers import Tokenizer, fingerprint_of
from weft.training.tasks.base import TaskSettings


class TextTask:
    """A corpus for a model that has at least `needed` classes; `classes` names them in the refusal.

    Raises:
        InputError: if the data is refused or the model has fewer classes.
    """

    takes_divided_logits = True
    takes_divided_tokens = True

    def __init__(self, settings: TaskSettings, tokenizer: Tokenizer, needed: int, classes: str) -> None:
        if settings.vocabulary < needed:
            problem = f"{settings.vocabulary} is too small; allowed: at least {needed}, {classes}"
            raise InputError(Violation("model.vocabulary", problem, str(needed)))
        self.corpus = open_corpus(settings.data, settings.sequence, tokenizer, settings.cache)
        self.samples = len(self.corpus.training)
        self.held_out_samples = len(self.corpus.held_out)
        self.tokens_per_sample = settings.sequence
        self.fingerprint = self.corpus.fingerprint
        self.about = {"tokenizer": tokenizer.name, "tokenizer_fingerprint": fingerprint_of(tokenizer)}
        repaired, first = self.corpus.repaired
        if repaired:
            problem = "bytes that are not UTF-8 are read as U+FFFD"
            self.about["warning"] = f"{repaired} documents, the first {first}: {problem}"

    def windows(self, samples: Ints, *, held_out: bool) -> Ints:
        """Return the tokens of samples with the last target, int64 of shape (samples, sequence + 1)."""
        return (self.corpus.held_out if held_out else self.corpus.training).take(samples)
