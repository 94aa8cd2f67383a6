"""What the tasks of text have in common."""

from __future__ import annotations

from collections.abc import Mapping

from weft.errors import InputError, Violation
from weft.training.data.text import Corpus
from weft.training.data.tokenizers import Tokenizer, fingerprint_of


def require_vocabulary(given: int, needed: int, what: str) -> None:
    """Refuse a model with fewer classes than `needed`, which are those of `what`.

    Raises:
        InputError: naming both.
    """
    if given < needed:
        problem = f"{given} is too small; allowed: at least {needed}, {what}"
        raise InputError(Violation("model.vocabulary", problem, str(needed)))


def about_text(tokenizer: Tokenizer, corpus: Corpus) -> Mapping[str, str | int]:
    """What a run says at its start about the text it reads."""
    repaired, first = corpus.repaired
    about: dict[str, str | int] = {
        "tokenizer": tokenizer.name,
        "tokenizer_fingerprint": fingerprint_of(tokenizer),
    }
    if repaired:
        problem = "bytes that are not UTF-8 are read as U+FFFD"
        about["warning"] = f"{repaired} documents, the first {first}: {problem}"
    return about
