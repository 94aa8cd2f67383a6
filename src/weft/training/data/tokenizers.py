"""Tokenizers: from the bytes of documents to token ids and back.

`bytes` needs no file; any other name is that of a `tokenizer.json` (`weft.training.data.tokenizer_json`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from weft.describe.run_file import RunFile
from weft.describe.run_tables.training import BYTES, MODEL
from weft.errors import InputError, Violation, nearest
from weft.program.arrays import Ints
from weft.training.data.chat_template import ChatTemplate

Ids = npt.NDArray[np.unsignedinteger]


class Tokenizer(Protocol):
    """The interface of a tokenizer for the data pipeline.

    Attributes:
        name: the user's name for it.
        key: a text that differs if the same bytes give other ids; it keeps cached tokens apart.
        vocabulary: one more than the highest id.
        mask: the id of a masked token; `vocabulary` if it has no such token.
        reads_utf8: True if bytes that are not UTF-8 become U+FFFD, so that `decode` does not restore them.
        end: the id that ends a document.
        chat_template: the template of its conversations; None if it has none.
    """

    name: str
    key: str
    vocabulary: int
    mask: int
    reads_utf8: bool
    end: int
    chat_template: ChatTemplate | None

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        """Return the ids of each whole document, shape (tokens,); the last one ends the document."""
        ...

    def encode_chats(self, texts: Sequence[str]) -> list[tuple[Ids, Ints]]:
        """Return the ids of each text, and for every id the place in the text of its first character.

        Special tokens that a text names are special; nothing ends a text.
        """
        ...

    def decode(self, tokens: npt.NDArray[np.integer]) -> bytes:
        """Return the bytes of `tokens`, without end-of-document ids."""
        ...


class ByteTokenizer:
    """A tokenizer with one token per byte; byte 0, which text does not contain, ends a document."""

    name = BYTES
    key = "bytes 1"
    vocabulary = 256
    mask = 256
    reads_utf8 = False
    end = 0
    chat_template: ChatTemplate | None = None

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        return [np.frombuffer(document + b"\0", dtype=np.uint8) for document in documents]

    def encode_chats(self, texts: Sequence[str]) -> list[tuple[Ids, Ints]]:
        return [self._encode_chat(text) for text in texts]

    @staticmethod
    def _encode_chat(text: str) -> tuple[Ids, Ints]:
        ids = np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8)
        # Every byte that begins a character counts one up.
        return ids, np.cumsum((ids & 0b1100_0000) != 0b1000_0000).astype(np.int64) - 1

    def decode(self, tokens: npt.NDArray[np.integer]) -> bytes:
        return bytes(tokens[tokens != 0].tolist())


def ids_type(tokenizer: Tokenizer) -> np.dtype[np.unsignedinteger]:
    """Return the smallest type that holds all ids."""
    return np.min_scalar_type(tokenizer.vocabulary - 1)


def about(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what the event `data` says of a tokenizer."""
    return {"tokenizer": tokenizer.name, "tokenizer_fingerprint": fingerprint_of(tokenizer)}


def fingerprint_of(tokenizer: Tokenizer) -> str:
    """Return a short hash of the tokenizer's key; it differs if the same bytes give other ids."""
    return hashlib.sha256(tokenizer.key.encode()).hexdigest()[:16]


def tokenizer_name(run: RunFile) -> str:
    """Return the name of a run's tokenizer: `bytes`, or its file or folder."""
    if run.task.tokenizer != MODEL:
        return run.task.tokenizer
    folder = Path(run.model.hf or "").expanduser()
    return str(folder.parent if folder.is_file() else folder)


def get_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a name: `bytes`, a `tokenizer.json` or a folder with one.

    Raises:
        InputError: if there is none, or its file cannot be used.
    """
    if name == BYTES:
        return ByteTokenizer()
    path = Path(name).expanduser()
    if not path.exists():
        problem = f"{name!r} does not exist; allowed: {BYTES}, a tokenizer.json or a folder with one"
        raise InputError(Violation("task.tokenizer", problem, nearest(name, [BYTES])))
    # The import is here, because a run of bytes does not need the library.
    from weft.training.data.tokenizer_json import JsonTokenizer

    return JsonTokenizer.read(path)


def require_classes(tokenizer: Tokenizer, vocabulary: int, *, masked: bool) -> None:
    """Refuse a model with too few classes for a tokenizer's tokens and, if `masked`, for its mask.

    Raises:
        InputError: naming the classes that are needed.
    """
    needed = max(tokenizer.vocabulary, tokenizer.mask + 1) if masked else tokenizer.vocabulary
    if vocabulary < needed:
        classes = "tokens and the mask of" if masked else "that of the tokenizer"
        problem = f"{vocabulary} is too small; allowed: at least {needed}, {classes} {tokenizer.name}"
        raise InputError(Violation("model.vocabulary", problem, str(needed)))
