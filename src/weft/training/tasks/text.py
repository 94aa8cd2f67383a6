"""Functions that the tasks of text share."""

from __future__ import annotations

from collections.abc import Mapping

from weft.errors import InputError, Violation
from weft.training.data.text import Corpus
from weft.training.data.tokenizers import Tokenizer, fingerprint_of


def require_vocabulary(given: int, needed: int, what: str) -> None:
    """Refuse a model with fewer classes than `needed`; `what` names the classes in the message.

    Raises:
        InputError: with both numbers.
    """
    if given < needed:
        problem = f"{given} is too small; allowed: at least {needed}, {what}"
        raise InputError(Violation("model.vocabulary", problem, str(needed)))


def about_text(tokenizer: Tokenizer, corpus: Corpus) -> Mapping[str, str | int]:
    """Return the description of a run's text for the event `data`."""
    repaired, first = corpus.repaired
    about: dict[str, str | int] = {
        "tokenizer": tokenizer.name,
        "tokenizer_fingerprint": fingerprint_of(tokenizer),
    }
    if repaired:
        problem = "bytes that are not UTF-8 are read as U+FFFD"
        about["warning"] = f"{repaired} documents, the first {first}: {problem}"
    return about
